"""From a model's text to what a client is told: reasoning, content, calls of tools.

A parser takes one choice's text in pieces and gives events. However the text is cut into pieces,
the events say the same, and nothing of the text is lost.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Content:
    text: str


@dataclass(slots=True)
class Reasoning:
    text: str


@dataclass(slots=True)
class ToolCallStart:
    index: int  # of the call in this choice, from 0
    id: str
    name: str


@dataclass(slots=True)
class ToolArguments:
    """The next bytes of a call's arguments, a JSON object."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | ToolArguments


class OutputParser(Protocol):
    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The text ends here: what was held back. Nothing may be fed after it."""
        ...


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []
