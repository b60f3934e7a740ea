"""The parser of a model's output: what each format gives, however its text is cut."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lite.output_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    detect_reasoning_format,
    detect_tool_format,
)
from vllm_lite.output_parser import (
    Content,
    Event,
    Reasoning,
    ToolArguments,
    ToolCallStart,
    make_output_parser,
)

# Options of make_output_parser: every format alone, some with reasoning, and what is forced.
SETUPS: dict[str, dict[str, Any]] = {
    **{
        name: {"tools": name}
        for name in ("hermes", "llama3_json", "pythonic", "mistral", "deepseek_v3")
    },
    "qwen3": {"reasoning": "qwen3"},
    "hermes+qwen3": {"tools": "hermes", "reasoning": "qwen3"},
    "llama3_json+qwen3": {"tools": "llama3_json", "reasoning": "qwen3"},
    "inside": {"tools": "mistral", "reasoning": "qwen3", "starts_in_reasoning": True},
    "required": {"required": True},
    "named": {"named": "f"},
    "single": {"tools": "hermes", "parallel": False},
}


def parse(pieces: list[str], **setup: Any) -> list[Event]:
    """The events with neighbours of a kind joined, and ids, which are random, left out."""
    parser = make_output_parser(**setup)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ToolCallStart):
            joined.append(ToolCallStart(event.index, "", event.name))
        elif type(event) is type(last) and getattr(event, "index", 0) == getattr(last, "index", 0):
            last.text += event.text  # type: ignore[union-attr]
        else:
            joined.append(event)
    return joined


def summary(text: str, **setup: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls as (name, arguments)); the same for three ways to cut the text."""
    whole = parse([text], **setup)
    assert whole == parse(list(text), **setup)
    assert whole == parse([text[i : i + 3] for i in range(0, len(text), 3)], **setup)
    calls: list[tuple[str, str]] = []
    for event in whole:
        if isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, ToolArguments):
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    texts = [
        "".join(event.text for event in whole if isinstance(event, kind))
        for kind in (Reasoning, Content)
    ]
    return texts[0], texts[1], calls


ARGUMENTS = [
    '{"n1":2,"n2":2}',
    '{"a":"}"}',
    '{"a": "</tool_call> [TOOL_CALLS] <|python_tag|> ```", "b": [1, {"c": {}}]}',
    "{}",
    '{ "quote": "\\"\\\\", "u": "\\u00e9 é 😀" , "n": -1.5e3, "x": [true, null] }',
]
PYTHON_ARGUMENTS = [
    ("", {}),
    ("n1=2, n2=-2.5", {"n1": 2, "n2": -2.5}),
    ("a='}])', b=\"it's\"", {"a": "}])", "b": "it's"}),
    ("a=[1, [2, 'x',], {}], b={'k': {'l': None}, 'm': [True, False]},", None),
    (r"a='\n\t\'\"\\ \x41\u00e9\U0001F600\101 \q'", {"a": "\n\t'\"\\ Aé😀A \\q"}),
    ("a='''it's\n\"so\"''', b='', c=1_000, d=0x10, e=.5, f=1.", None),
    ("a=true, b='é😀\\\n'", {"a": True, "b": "é😀"}),
]


def as_written(name: str, calls: list[tuple[str, str]]) -> str:
    """Calls as a model of this format writes them."""
    objects = [f'{{"name": "{tool}", "arguments": {text}}}' for tool, text in calls]
    parameters = [f'{{"name": "{tool}", "parameters": {text}}}' for tool, text in calls]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    if name == "llama3_json":
        return "; ".join(parameters)
    if name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if name == "required":
        return f"[{','.join(parameters)}]"
    if name == "deepseek_v31":
        parts = [
            f"<｜tool▁call▁begin｜>{tool}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
            for tool, text in calls
        ]
        return f"<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>"
    assert name == "deepseek_v3"
    parts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{tool}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        for tool, text in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


JSON_FORMATS = {
    name: {"tools": name}
    for name in ("hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31")
} | {"required": {"required": True}}


@pytest.mark.case("TCL-03")
@pytest.mark.case("TCL-05")
@pytest.mark.parametrize(("name", "setup"), JSON_FORMATS.items(), ids=JSON_FORMATS.keys())
def test_json_arguments_are_handed_on_as_they_stand(name: str, setup: dict[str, Any]) -> None:
    calls = [(f"tool_{i}", arguments) for i, arguments in enumerate(ARGUMENTS)]
    for some in (calls[:1], calls[1:2], calls):
        assert summary(as_written(name, some), **setup) == ("", "", some)


@pytest.mark.case("TCL-05")
@pytest.mark.parametrize(("written", "expected"), PYTHON_ARGUMENTS)
def test_python_arguments_become_json(written: str, expected: object) -> None:
    if expected is None:
        expected = eval(f"dict({written})")
    for text in (
        f"[f({written})]",
        f"[ f( {written} ) , f({written}) ]\n",
        f"<|python_start|>[f({written})]<|python_end|>",
    ):
        reasoning, content, calls = summary(text, tools="pythonic")
        assert (reasoning, content) == ("", "")
        assert len(calls) == text.count("f(")
        for tool, arguments in calls:
            assert tool == "f"
            assert json.loads(arguments) == expected, arguments


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "Let me see.\n\n<tool_call>{}</tool_call>".format(
            '{"name": "f", "arguments": {}}'), "Let me see.", [("f", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n\n', "",
         [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"id": [1], "name": "f\\u0041", "x": "y", "arguments": {}, "z": 1}'
         "</tool_call>", "", [("fA", "{}")]),
        ("hermes", 'a\n<tool_call>{"name": "f", "arguments": {}}</tool_call> b', "a\n b",
         [("f", "{}")]),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}',
         "", [("f", '{"a": 1}')]),
        ("llama3_json", 'Well. <|python_tag|>{"name": "f", "parameters": {}}', "Well.",
         [("f", "{}")]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g{\"a\": 1}", "",
         [("f", "{}"), ("g", '{"a": 1}')]),
        ("mistral", "Hm[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS] {}", "Hm", [("f", "{}")]),
    ],
)  # fmt: skip
def test_what_models_write_is_understood(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert summary(text, tools=name) == ("", content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "plain < text <tool_cal"),
        ("hermes", '\n {"name": "f", "arguments": {}} \n'),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call> no JSON </tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f\\'),
        ("hermes", "<tool_call>{name: f}</tool_call>"),
        ("llama3_json", '{"name": "Ann", "age": 7}'),
        ("llama3_json", '{"name": "Ann"}'),
        ("llama3_json", '{"city": {"name": "f", "parameters": {}}}'),
        ("llama3_json", 'text {"name": "f", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("pythonic", "f(a=1)"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[link](https://x.y/)"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "text [f(a=1)]"),
        ("mistral", "[TOOL_CALLS] f and no more"),
        ("mistral", "[1] [TOOL_CALL] "),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
    ],
)
def test_what_is_no_call_is_content_to_the_letter(name: str, text: str) -> None:
    assert summary(text, tools=name) == ("", text, [])


@pytest.mark.case("TCL-06")
@pytest.mark.parametrize(("name", "setup"), JSON_FORMATS.items(), ids=JSON_FORMATS.keys())
def test_a_call_cut_short_keeps_what_came(name: str, setup: dict[str, Any]) -> None:
    call = ("tool", '{"a": "b\\"}", "c": [{"d": 1}]}')
    text = as_written(name, [call])
    start = text.index(call[1])
    for end in range(len(text) + 1):
        _, content, calls = summary(text[:end], **setup)
        if end <= start:
            assert calls == [] and content == text[:end]
        else:
            assert content == ""
            assert calls == [(call[0], call[1][: end - start])]


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": <b>}}', '{"a": ', "<b>}}"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1]}', '{"a": 1', "]}"),
        ('<tool_call>{"name": "f", "arguments": {}} more</tool_call>', "{}", "more</tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {}}} \n</tool_call>', "{}", "} \n</tool_call>"),
    ],
)
def test_a_call_that_breaks_late_is_a_call_and_then_content(
    text: str, arguments: str, rest: str
) -> None:
    assert summary(text, tools="hermes") == ("", rest, [("f", arguments)])


def test_python_that_breaks_is_a_call_and_then_content() -> None:
    for text, content, arguments in (
        ("[f(a=1, b=x)]", "x)]", '{"a": 1, "b": '),
        ("[f(a=1, 2)]", ", 2)]", '{"a": 1'),
        ("[f(a='\\u12')]", "\\u12')]", '{"a": "'),
        ("[f(a=[1 2])]", "2])]", '{"a": [1'),
        ("[f(a={1: 2})]", "1: 2})]", '{"a": {'),
        # What the text's end leaves of a literal is no content.
        ("[f(a=1, b", "", '{"a": 1'),
        ("[f(a=Tru", "", '{"a": '),
    ):
        assert summary(text, tools="pythonic") == ("", content, [("f", arguments)])
    deep = "[f(a=" + "[" * 101 + "1"
    _, content, calls = summary(deep, tools="pythonic")
    assert content == "[1" and calls == [("f", '{"a": ' + "[" * 100)]


def test_reasoning_is_split_from_content() -> None:
    for text in (
        "<think>\nWhy?\n\nSo.\n</think>\n\nBecause.",
        "<think>Why?\n\nSo.</think>Because.",
    ):
        assert summary(text, reasoning="qwen3") == ("Why?\n\nSo.", "Because.", [])
    assert summary("Why?</think>No", reasoning="qwen3", starts_in_reasoning=True)[:2] == (
        "Why?",
        "No",
    )
    assert summary("<think>Why? ", reasoning="qwen3")[:2] == ("Why? ", "")
    assert summary("<think>\n\n</think>\n\nNo\n", reasoning="qwen3")[:2] == ("", "No\n")
    assert summary(" No <think>x</think>", reasoning="qwen3")[:2] == ("", " No <think>x</think>")
    # A call that is only thought of is none.
    call = as_written("hermes", [("f", "{}")])
    text = f"<think>maybe {call}</think>\n{call}\n"
    assert summary(text, tools="hermes", reasoning="qwen3") == (f"maybe {call}", "", [("f", "{}")])


def test_named_text_is_the_arguments() -> None:
    assert summary('{"a": 1} ', named="f") == ("", "", [("f", '{"a": 1} ')])
    assert summary("", named="f") == ("", "", [])


def test_without_parallel_calls_the_first_is_kept() -> None:
    text = "See: " + as_written("hermes", [("f", "{}"), ("g", "{}")]) + " Done."
    assert summary(text, **SETUPS["single"]) == ("", "See: \n Done.", [("f", "{}")])


def test_ids_are_unique_and_of_the_form_that_templates_take() -> None:
    for name, length in (("hermes", 29), ("mistral", 9)):
        text = as_written(name, [("f", "{}"), ("g", "{}")])
        ids = [e.id for e in make_output_parser(name).feed(text) if isinstance(e, ToolCallStart)]
        assert len(set(ids)) == 2
        assert all(len(i) == length and i.replace("call_", "").isalnum() for i in ids)


# Pieces that make up adversarial texts: marks, parts of them, JSON and Python around them.
MARKS = sorted(
    {mark for form in TOOL_FORMATS.values() for mark in form.markers()}
    | {mark for form in REASONING_FORMATS.values() for mark in (form.open, form.close)}
)
SCRAPS = [
    '{"name": "f", "arguments": {"a": "é😀\\u00e9"}}', '{"name": "f", "parameters": {', "{}", "}",
    '"', "\\", "[", "]", "(", ")", ",", ";", ":", "=", " ", "\n", "'", "'''", "f", "g(", "a=", "12",
    "True", "\\x4", "\\u12", "name", '"name"', '"arguments"', "function", "<", "<tool", "｜>", "é",
    "日本", "[f(a=1, b='x')]", "[f(x=[{'k': ",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(MARKS + SCRAPS) | st.text(max_size=3), max_size=24).map("".join)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same_events(setup: dict[str, Any], data: st.DataObject) -> None:
    text = data.draw(TEXTS)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert parse(pieces, **setup) == parse([text], **setup) == parse(list(text), **setup)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet='ab <[{"\n｜é', max_size=40))
def test_text_without_a_call_is_kept_whole(setup: dict[str, Any], text: str) -> None:
    joined = "".join(e.text for e in parse([text], **setup) if not isinstance(e, ToolCallStart))
    thinks = setup.get("starts_in_reasoning")
    assert joined == (text.lstrip() or joined) if thinks else joined == text


HALF_CALLS = {
    "hermes": ["<tool_call>{", '<tool_call>{"a":'],
    "llama3_json": [
        "{",
        '{"name":"f","parameters":[[',
        '<|python_tag|>{"name":"f","parameters":{"',
    ],
    "pythonic": ["[", "[f(a=[", "[f(a='\\"],
    "mistral": ["[TOOL_CALLS][", "[TOOL_CALLS]f[ARGS]{["],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"],
    "qwen3": ["<think>", "</think", " "],
    "required": ["[", '[{"name":"f","parameters":{', '[{"name":"\\'],
}


@pytest.mark.case("SEC-05")
@pytest.mark.parametrize("name", HALF_CALLS)
def test_time_is_linear_in_openings_without_an_end(name: str) -> None:
    marks = TOOL_FORMATS[name].markers()[:1] if name in TOOL_FORMATS else ()
    for unit in [*marks, *HALF_CALLS[name]]:
        text = (unit * (500_000 // len(unit) + 1))[:500_000]
        sizes = (len(text), 100) if unit in marks else (len(text),)
        for size in sizes:
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            seconds = []
            while len(seconds) < 3 and min(seconds, default=1.0) >= 0.5:  # a machine may be busy
                parser = make_output_parser(**SETUPS[name])
                began = time.process_time()
                events = [event for piece in pieces for event in parser.feed(piece)]
                events += parser.finish()
                seconds.append(time.process_time() - began)
            assert min(seconds) < 0.5, (unit, size)
            if unit in marks:
                assert {type(event) for event in events} == {Content}
                assert "".join(event.text for event in events) == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call> <tool_call>',
         "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=a>", None),
        ("{% if 'arguments' %}<tool_call>f\n<arg_key>a</arg_key>", None),
        ("'[TOOL_CALLS][' + tool_call|tojson", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek_v3"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name '
         'and its value}.', "llama3_json"),
        ("<|im_start|>{{ message.content }}<|im_end|>", None),
        ('<tool_call>{"arguments": 1}</tool_call> [TOOL_CALLS]', None),
    ],
)  # fmt: skip
def test_the_format_is_known_by_the_template(template: str, name: str | None) -> None:
    assert detect_tool_format(["plain", template]) == name


def test_reasoning_is_known_by_the_template() -> None:
    assert detect_reasoning_format(["x", "<think>\n\n</think>\n\n"]) == "qwen3"
    assert detect_reasoning_format(["</think>"]) is None
