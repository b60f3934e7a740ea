"""How families of models write calls of tools and reasoning, as data for ``output_parser``.

The names are vLLM's. What the formats are was taken from the models' own chat templates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# A parser's name in an option: chosen by the chat template, or none at all.
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A group of calls is ``open``, calls, ``close``; a call is ``begin``, the call, ``ends``.

    A call is one of three, told apart by its first character and ``python``: a JSON object that
    has the name and the arguments; a name with a JSON object behind it; a Python call. White space
    may stand anywhere between the parts. All marks but ``open`` and ``begin`` may be missing, as
    models forget them.
    """

    open: str = ""  # "": there is nothing to know a group by but its place, see at_start
    at_start: bool = False  # a group may also stand at the beginning of the text, without open
    listed: bool = False  # calls may lie in [ ], separated by commas
    begin: str = ""
    ends: tuple[str, ...] = ()
    separator: str = ""  # between calls that do not lie in [ ]
    close: str = ""
    name_prefix: str = ""  # of a call by name
    name_ends: tuple[str, ...] = ()  # between name and arguments; each may have a word behind it
    python: bool = False
    short_ids: bool = False  # ids that Mistral's templates take: 9 letters and digits

    def markers(self) -> tuple[str, ...]:
        """Texts that a model may have as special tokens."""
        marks = (self.open, self.begin, *self.ends, self.close, *self.name_ends)
        return tuple(mark for mark in marks if mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning stands at the beginning of the text, between ``open`` and ``close``."""

    open: str
    close: str
    always: bool = False  # the text begins inside unless the prompt ends with ``close``

    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close)


_HERMES = ToolFormat(open="<tool_call>", close="</tool_call>")
_LLAMA_JSON = ToolFormat(open="<|python_tag|>", at_start=True, separator=";")
_PYTHONIC = ToolFormat(
    open="<|python_start|>", close="<|python_end|>", at_start=True, listed=True, python=True
)
_DEEPSEEK = ToolFormat(
    open="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁call▁begin｜>",
    name_prefix="function<｜tool▁sep｜>",
    name_ends=("<｜tool▁sep｜>", "```json"),
    ends=("```", "<｜tool▁call▁end｜>"),
    close="<｜tool▁calls▁end｜>",
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "mistral": ToolFormat(
        open="[TOOL_CALLS]", listed=True, name_ends=("[CALL_ID]", "[ARGS]"), short_ids=True
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
}

# What a model is made to write where the request demands a call.
FORCED_FORMAT = ToolFormat(at_start=True, listed=True)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(open="<think>", close="</think>"),
    "deepseek_r1": ReasoningFormat(open="<think>", close="</think>", always=True),
}

# All of the first must be in a template, none of the second.
_TOOL_SIGNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "deepseek_v3": (("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), ()),
    "mistral": (("[TOOL_CALLS]",), ()),
    # Others put XML between these tags.
    "hermes": (("<tool_call>", "arguments"), ("<function=", "<arg_key>", "<parameter")),
    # From the instruction that Llama's templates give.
    "llama3_json": (("parameters", "dictionary of argument name and its value"), ("<tool_call>",)),
}


def detect_tool_format(templates: Iterable[str]) -> str | None:
    """The name of the format that the chat templates of a model speak of; None: not certain."""
    text = "\n".join(templates)
    found = [
        name
        for name, (present, absent) in _TOOL_SIGNS.items()
        if all(sign in text for sign in present) and not any(sign in text for sign in absent)
    ]
    return found[0] if len(found) == 1 else None


def detect_reasoning_format(templates: Iterable[str]) -> str | None:
    text = "\n".join(templates)
    return "qwen3" if "<think>" in text and "</think>" in text else None
