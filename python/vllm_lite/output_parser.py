"""From a model's text to what a client is told: reasoning, content, calls of tools.

A parser takes one choice's text in pieces and gives events. However the text is cut into pieces,
the events say the same, and nothing of the text is lost:

* White space between a text and a mark is the mark's, unless content follows on both sides.
* A call begins when its name and the beginning of its arguments are there. JSON arguments are
  handed on as they stand, Python's are translated literal by literal.
* What looks like a call and breaks before it begins is content, mark and all. If it breaks later,
  its arguments stay as far as they came, and the rest is content. The text's end is such a break.
* Time is linear in the text: what was taken for a call and given back is not searched again.
"""

import secrets
import string
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from vllm_lite.output_formats import (
    FORCED_FORMAT,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
)
from vllm_lite.output_text import (
    SPACE,
    WORD,
    IncrementalText,
    Steps,
    Use,
    json_object,
    json_string,
    python_literal,
    skip_json,
)


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


def make_output_parser(
    tools: str | None = None,
    reasoning: str | None = None,
    *,
    starts_in_reasoning: bool = False,
    required: bool = False,
    named: str | None = None,
    parallel: bool = True,
) -> OutputParser:
    """A parser for one choice.

    ``tools`` and ``reasoning`` name formats of ``output_formats``; None: there is nothing of the
    kind. ``starts_in_reasoning``: the text begins inside, as when the prompt ends with the opening
    mark. ``required``: the text is a JSON list of objects with ``name`` and ``parameters``.
    ``named``: the text is the arguments of a call of this tool. Both come from a grammar and leave
    no place for reasoning.
    ``parallel`` false: calls after the first are dropped.
    """
    tool_format = None if tools is None else TOOL_FORMATS[tools]
    short_ids = tool_format is not None and tool_format.short_ids
    if named is not None:
        return _NamedParser(named, _new_id(short_ids))
    if required:
        return _Parser(FORCED_FORMAT, None, False, short_ids, parallel)
    if reasoning is not None:
        form = REASONING_FORMATS[reasoning]
        return _Parser(tool_format, form, starts_in_reasoning, short_ids, parallel)
    if tool_format is not None:
        return _Parser(tool_format, None, False, short_ids, parallel)
    return PlainParser()


def _new_id(short: bool) -> str:
    if short:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class _NamedParser:
    """All text is the arguments of one call."""

    def __init__(self, name: str, call_id: str) -> None:
        self._start: list[Event] = [ToolCallStart(0, call_id, name)]

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        start, self._start = self._start, []
        return [*start, ToolArguments(0, text)]

    def finish(self) -> list[Event]:
        return []


_ARGUMENTS_KEYS = ("arguments", "parameters")
# Of a call that nothing but its place tells from any other JSON object.
_OTHER_KEYS = ("type", "id")


class _Parser:
    """Recursive descent, written as generators that yield where they need more text."""

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        starts_in_reasoning: bool,
        short_ids: bool,
        parallel: bool,
    ) -> None:
        self._tools = tools
        self._short_ids = short_ids
        self._parallel = parallel
        self._text = IncrementalText()  # holds what is content if a call turns out broken
        self._calls = 0
        self._events: list[Event] = []
        self._content = _Outlet(lambda text: self._events.append(Content(text)))
        self._reasoning = _Outlet(lambda text: self._events.append(Reasoning(text)))
        self._steps = self._run(reasoning, starts_in_reasoning)

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        self._text.add(text)
        next(self._steps)
        return self._drain()

    def finish(self) -> list[Event]:
        self._text.closed = True
        for _ in self._steps:
            raise AssertionError("the parser waits for text after its end")
        return self._drain()

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return _merged(events) if len(events) > 1 else events

    def _run(self, reasoning: ReasoningFormat | None, inside: bool) -> Steps[None]:
        if reasoning is not None:
            yield from self._reason(reasoning, inside)
        tools = self._tools
        if tools is not None and tools.at_start:
            self._text.held = []
            yield from self._group(tools)
        while (yield from self._text.copy_until(tools.open if tools else "", self._content.write)):
            assert tools is not None
            self._text.held = [tools.open]
            yield from self._group(tools)
        self._content.end()

    def _reason(self, form: ReasoningFormat, inside: bool) -> Steps[None]:
        space = yield from self._text.take(SPACE)
        # Some write the mark although the prompt ends with it.
        if not (yield from self._text.accept(form.open)) and not inside:
            self._content.write(space)
            return
        self._reasoning.mark()
        if (yield from self._text.copy_until(form.close, self._reasoning.write)):
            self._content.mark()
        else:
            self._reasoning.end()

    def _group(self, form: ToolFormat) -> Steps[None]:
        """Calls as far as there are any; what was taken and belongs to none becomes content."""
        text = self._text
        yield from text.space()
        listed = form.listed and (yield from text.accept("["))
        # A Python call without brackets around it is prose more often than not.
        more = listed or not form.python
        before = self._calls
        while more:
            yield from text.space()
            if form.begin and not (yield from text.accept(form.begin)):
                break
            started = self._calls
            if not (yield from self._call(form)):
                if self._calls > started and text.closed and text.at == len(text.text):
                    text.held = []  # of arguments that the end cut short
                self._give_back()
                return
            text.held = []
            for end in form.ends:
                yield from self._drop(end)
            yield from text.space()
            separator = "," if listed else form.separator
            more = bool(form.begin) or (separator != "" and (yield from text.accept(separator)))
            if listed and not more:
                yield from self._drop("]")
        if form.close and self._calls > before:
            yield from self._drop(form.close)
        self._give_back()

    def _drop(self, mark: str) -> Steps[None]:
        """What was held is used up if the mark follows it, or the part of it that there is."""
        text = self._text
        yield from text.space()
        if (yield from text.accept(mark)) or (text.at < len(text.text) and text.ends_in(mark)):
            text.held = []

    def _give_back(self) -> None:
        if self._text.held:
            self._content.write("".join(self._text.held))
        self._text.held = None

    def _call(self, form: ToolFormat) -> Steps[bool]:
        """True when a call is complete, False when it is broken."""
        text = self._text
        yield from text.space()
        if form.python:
            return (yield from self._python_call())
        if (yield from text.peek()) == "{":
            return (yield from self._object_call(strict=form.at_start))
        if not form.name_ends:
            return False
        yield from text.accept(form.name_prefix)
        name = yield from text.take(WORD)
        yield from text.space()
        for mark in form.name_ends:
            if (yield from text.accept(mark)):
                yield from text.take(WORD)
                yield from text.space()
        if not name or (yield from text.peek()) != "{":
            return False
        self._start(name)
        return (yield from json_object(text, self._argue))

    def _object_call(self, *, strict: bool) -> Steps[bool]:
        """``{"name": ..., "arguments": {...}}`` in any order.

        ``strict``: it has arguments, and no keys that a call has not.
        """
        text = self._text
        yield from text.accept("{")
        name: str | None = None
        early: list[str] = []  # arguments before the name
        started = False
        while True:
            yield from text.space()
            key = yield from json_string(text)
            yield from text.space()
            if key is None or not (yield from text.accept(":")):
                return False
            yield from text.space()
            if key == "name" and name is None:
                name = yield from json_string(text)
                if not name:
                    return False
                if early:
                    self._start(name)
                    self._argue("".join(early))
                    started = True
            elif key in _ARGUMENTS_KEYS and not started and not early:
                if (yield from text.peek()) != "{":
                    return False
                use: Use = early.append
                if name is not None:
                    self._start(name)
                    started = True
                    use = self._argue
                if not (yield from json_object(text, use)):
                    return False
            elif (strict and key not in _OTHER_KEYS) or not (yield from skip_json(text)):
                return False
            yield from text.space()
            if (yield from text.accept(",")):
                continue
            if not (yield from text.accept("}")):
                return False
            if not started:
                if name is None or strict:
                    return False
                self._start(name)
                self._argue("{}")
            return True

    def _python_call(self) -> Steps[bool]:
        text = self._text
        name = yield from text.take(WORD)
        if not name or not (yield from text.accept("(")):
            return False
        yield from text.space()
        if (yield from text.accept(")")):
            self._start(name)
            self._argue("{}")
            return True
        before = "{"
        while True:
            key = yield from text.take(WORD)
            yield from text.space()
            if not key or not (yield from text.accept("=")):
                return False
            if before == "{":
                self._start(name)
            self._argue(f'{before}"{key}": ')
            before = ", "
            yield from text.space()
            if not (yield from python_literal(text, self._argue)):
                return False
            yield from text.space()
            comma = yield from text.accept(",")
            yield from text.space()
            if (yield from text.accept(")")):
                self._argue("}")
                return True
            if not comma:
                return False

    def _start(self, name: str) -> None:
        self._text.held = []
        self._content.mark()
        self._calls += 1
        if self._parallel or self._calls == 1:
            self._events.append(ToolCallStart(self._calls - 1, _new_id(self._short_ids), name))

    def _argue(self, text: str) -> None:
        self._text.held = []
        if self._parallel or self._calls == 1:
            self._events.append(ToolArguments(self._calls - 1, text))


class _Outlet:
    """Hands text on; white space waits for what comes after it."""

    def __init__(self, emit: Use) -> None:
        self._emit = emit
        self._space: list[str] = []
        self._spoke = False
        self._after_mark = False

    def write(self, text: str) -> None:
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        space, self._space = self._space, [text[len(body) :]]
        at_mark = self._after_mark and not self._spoke
        self._spoke, self._after_mark = True, False
        self._emit(body.lstrip() if at_mark else "".join(space) + body)

    def mark(self) -> None:
        """A mark stands here: white space beside it counts only between two texts."""
        self._after_mark = True

    def end(self) -> None:
        rest = "".join(self._space)
        if rest and not self._after_mark:
            self._emit(rest)


def _merged(events: list[Event]) -> list[Event]:
    """Texts of the same kind that follow each other as one."""
    merged: list[Event] = []
    for _, run in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        first, *rest = run
        if rest and not isinstance(first, ToolCallStart):
            texts = [event.text for event in rest if not isinstance(event, ToolCallStart)]
            first.text = "".join([first.text, *texts])
        merged.append(first)
    return merged
