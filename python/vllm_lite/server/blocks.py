"""Groups what a parser tells into blocks, one after the other: a text, a reasoning, a call.

The Responses API calls them output items, the Messages API content blocks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from vllm_lite.output_parser import (
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolArguments,
    ToolCallStart,
)


class Kind(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    kind: Kind
    index: int  # in the answer
    call_id: str = ""
    name: str = ""  # of the function that is called
    pieces: list[str] = field(default_factory=list)
    complete: bool = False  # False for ever where the answer was cut off

    @property
    def text(self) -> str:
        """All so far; of a call its arguments."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Opened:
    block: Block


@dataclass(slots=True)
class Grown:
    block: Block
    text: str


@dataclass(slots=True)
class Closed:
    block: Block


Change = Opened | Grown | Closed


class BlockReader:
    """At most one block, the last, is open."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self.blocks: list[Block] = []
        self._is_open = False

    def read(self, text: str, finish_reason: str | None) -> Iterator[Change]:
        """``finish_reason``: of the choice, with its last text."""
        yield from self._take(self._parser.feed(text))
        if finish_reason is not None:
            yield from self._take(self._parser.finish())
            yield from self._close(complete=finish_reason != "length")

    def has_calls(self) -> bool:
        return any(block.kind is Kind.CALL for block in self.blocks)

    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind is Kind.REASONING)

    def _take(self, events: Iterable[Event]) -> Iterator[Change]:
        for event in events:
            match event:
                case Content(text):
                    yield from self._grow(Kind.TEXT, text)
                case Reasoning(text):
                    yield from self._grow(Kind.REASONING, text)
                case ToolCallStart(_, call_id, name):
                    yield from self._open(Kind.CALL, call_id, name)
                case ToolArguments(_, text):
                    yield from self._grow(Kind.CALL, text)

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self._is_open or self.blocks[-1].kind is not kind:
            yield from self._open(kind)
        self.blocks[-1].pieces.append(text)
        yield Grown(self.blocks[-1], text)

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._close(complete=True)
        block = Block(kind, len(self.blocks), call_id, name)
        self.blocks.append(block)
        self._is_open = True
        yield Opened(block)

    def _close(self, *, complete: bool) -> Iterator[Change]:
        if self._is_open:
            self._is_open = False
            self.blocks[-1].complete = complete
            yield Closed(self.blocks[-1])
