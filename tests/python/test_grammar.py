"""What StructuredOutputsParams takes and refuses; engine/test_structured_outputs.py has outputs."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

import vllm_lite
from vllm_lite import SamplingParams
from vllm_lite.grammar import MAX_GRAMMAR_BYTES, _bytes_tokenizer, limits
from vllm_lite.sampling_params import StructuredOutputsParams


def accepts(text: str, **what: Any) -> bool:
    """Whether a complete output may be this text."""
    grammar = StructuredOutputsParams(**what).compiled
    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=limits())
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("what", "fits", "does_not"),
    [
        ({"regex": "a/b|c"}, ["a/b", "c"], ["", "a", "a/bc"]),
        ({"regex": "^ab$"}, ["ab"], ["a", "xab"]),
        ({"regex": "a\nb?"}, ["a\n", "a\nb"], ["a"]),
        ({"regex": "[\\x00-\\u2e7f]+"}, ["é", "\x00a"], ["日", ""]),
        ({"regex": "a&b"}, ["a&b"], ["a"]),
        (
            {"choice": ["a", "ab", 'x"y\\', "é日", "a b\n", "<|eos|>", "{}#~.*"]},
            ["a", "ab", 'x"y\\', "é日", "a b\n", "<|eos|>", "{}#~.*"],
            ["", "b", "aa", "é"],
        ),
        ({"json": {}}, ["1", "null", '{"a": [1, "x"]}'], ["", "{"]),
        ({"json": "true"}, ["1"], [""]),
        ({"json": {"type": "number"}}, ["1", "-1.5e3"], ["01", "1."]),
        ({"json_object": True}, ["{}", '{ "a" : 1 }'], ["[]", "1"]),
        ({"grammar": 'start: "a" start | "b"'}, ["b", "aab"], ["a"]),
        ({"grammar": 'root ::= "a" root | [0-9]'}, ["a7"], ["a"]),
        ({"grammar": 'start: "x" %json {"type": "integer"}'}, ["x12"], ["12", "x"]),
    ],
)
def test_accepted_texts(what: dict[str, Any], fits: list[str], does_not: list[str]) -> None:
    assert [accepts(text, **what) for text in fits] == [True] * len(fits)
    assert [accepts(text, **what) for text in does_not] == [False] * len(does_not)


def test_white_space_in_json_is_bounded_whatever_the_schema_says() -> None:
    for schema in ({}, {"x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}}):
        assert accepts("[1," + " " * 64 + "2]", json=schema)
        assert not accepts("[1," + " " * 65 + "2]", json=schema)


@pytest.mark.case("SOT-01")
@pytest.mark.case("SOT-03")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"regex": "[a-"}, "unclosed character class"),
        ({"regex": "(?P<"}, "unclosed capture group"),
        ({"regex": "*a"}, "missing expression"),
        ({"regex": "(?<=x)y"}, "look-behind"),
        ({"regex": "(?=x)y"}, "look-ahead"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"[^\x00-\x{10ffff}]"}, "no text can fulfil"),
        ({"regex": "\ud800"}, "lone surrogates"),
        ({"regex": 5}, "must be a string"),
        ({"regex": "x" * (MAX_GRAMMAR_BYTES + 1)}, "65537 bytes"),
        ({"regex": "\x01" * MAX_GRAMMAR_BYTES}, "becomes a grammar of more than"),
        ({"grammar": 'root: "a"'}, "is no grammar"),
        ({"grammar": "start: <|im_end|>"}, "unknown special token"),
        ({"grammar": "start: start"}, "no text can fulfil"),
        ({"grammar": "start: /(/"}, "structured_outputs.grammar"),
        ({"grammar": 'start: "x" %json {"type": "nope"}'}, "nope"),
        ({"grammar": "start: %json {"}, "after %json"),
        ({"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(2000))}, "1024"),
        ({"json": {"type": "nope"}}, "nope"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": {"$ref": "http://example.com/schema"}}, "example.com"),
        ({"json": {"$ref": "#/$defs/missing"}}, "structured_outputs.json"),
        ({"json": {"not": {}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "nope"}}, "nope"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "minimum"),
        ({"json": {"enum": []}}, "structured_outputs.json"),
        ({"json": {"multipleOf": 1_000_003}}, "multipleOf"),
        ({"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967.0}]}}, "multipleOf"),
        ({"json": {"allOf": [{"pattern": f"a{i}"} for i in range(11)]}}, "11 patterns"),
        ({"json": {"patternProperties": {f"^a{i}$": {} for i in range(65)}}}, "patternProperties"),
        ({"grammar": "start: A\nA: /a/" + " & /a/" * 11}, "intersections"),
        ({"json": "{"}, "not JSON"),
        ({"json": '{"const": NaN}'}, "NaN is not JSON"),
        ({"json": {"const": float("inf")}}, "cannot be written as JSON"),
        ({"json": {"const": {1, 2}}}, "cannot be written as JSON"),
        ({"json": {"const": "\ud800"}}, "lone surrogates"),
        ({"json": [1]}, "must be a JSON schema"),
        ({"json": {"const": "x" * MAX_GRAMMAR_BYTES}}, "bytes"),
        ({"choice": []}, "1 to 4096"),
        ({"choice": "ab"}, "1 to 4096"),
        ({"choice": ["a", 1]}, r"choice[1]"),
        ({"choice": [""]}, r"choice[0]"),
        ({"json_object": 1}, "true or false"),
        ({"json_object": False}, "exactly one"),
        ({}, "exactly one"),
        ({"json": {}, "regex": "a"}, "json and regex"),
    ],
)
def test_what_cannot_be_is_refused_by_name(what: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^structured_outputs\b") as raised:
        StructuredOutputsParams(**what)
    assert words in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.case("SOT-05")
@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("+a", None),
        ("{2}", None),
        ("(?<=x)+", None),
        ("|+", None),
        ("(*)", None),
        ("^$", ""),
        ("", ""),
        ("(|a)+b", "b"),
        ("()*", ""),
    ],
)
def test_a_quantifier_of_nothing_is_refused_or_means_nothing(
    pattern: str, fits: str | None
) -> None:
    if fits is not None:
        assert accepts(fits, regex=pattern)
        return
    with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
        StructuredOutputsParams(regex=pattern)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def chain(length: int, link: str) -> str:
    """Definitions of which each refers to the next."""
    definitions = [f'"d{i}":' + link.replace("NEXT", f"d{i + 1}") for i in range(length)]
    last = f'"d{length}":{{"type":"null"}}'
    return '{"$ref":"#/$defs/d0","$defs":{' + ",".join([*definitions, last]) + "}}"


@pytest.mark.case("SEC-10")
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#"}]}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        nested(900),
        json.dumps(nested(100)).replace("{}", '{"items":' * 5000 + "{}" + "}" * 5000),
        chain(2300, '{"$ref":"#/$defs/NEXT"}'),
        chain(1000, '{"type":"object","properties":{"x":{"$ref":"#/$defs/NEXT"}}}'),
        chain(300, '{"allOf":[{"$ref":"#/$defs/NEXT"},{"$ref":"#/$defs/NEXT"}]}'),
        {"$ref": "#/$defs/a/b/0", "$defs": {"a": {"b": [{"$ref": "#/$defs/a"}]}}},
    ],
    ids=range(12),
)
def test_cycles_and_depth_end_in_finite_time(schema: Any) -> None:
    began = time.process_time()
    try:
        StructuredOutputsParams(json=schema)
    except ValueError as error:
        assert str(error).startswith("structured_outputs.json")
    assert time.process_time() - began < 10


@pytest.mark.case("SEC-10")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#/$defs/p"}}, "$defs": {"p": {"$ref": "#/$defs/p"}}},
        {"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#/anyOf/1"}]}]},
        {"prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
    ids=range(5),
)
def test_a_schema_into_which_an_output_could_run_without_an_end_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="could not end"):
        StructuredOutputsParams(json=schema)


@pytest.mark.case("SEC-10")
def test_the_deepest_schema_leaves_room_on_the_stack() -> None:
    """It ended the process: 8 MiB held 1,700 levels of ``items``."""
    link = json.dumps(nested(100)).replace("{}", '{"$ref":"#/$defs/NEXT"}')
    program = (
        "import sys; from vllm_lite.sampling_params import StructuredOutputsParams as Params\n"
        "print(len(Params(json=sys.argv[1]).compiled))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, chain(19, link)],
        env={"PYTHONPATH": str(Path(vllm_lite.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0


@pytest.mark.case("SEC-10")
@pytest.mark.parametrize(
    "schema",
    [
        {"$anchor": "q", "properties": {"a": {"$ref": "#q"}}, "required": ["a"]},
        {"$id": "http://x/a", "properties": {"a": {"$ref": "a"}}, "required": ["a"]},
        {"properties": {"a": {"$ref": ""}}, "required": ["a"]},
        {"$ref": "http://x/", "$defs": {"a": {"$id": "http://x/", "$ref": "#"}}},
        {"properties": {"a": {"$id": "http://x/", "$ref": "#"}}},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "properties": {"a": {"id": "http://x/", "$ref": "#"}},
        },
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"allOf": [{"$ref": "#/%24defs/a%20b"}]}}},
    ],
    ids=range(7),
)
def test_no_reference_goes_past_the_checks(schema: Any) -> None:
    """Anchors, ids and escapes hid depth and cycles, which llguidance then followed."""
    with pytest.raises(ValueError, match=r"\$ref|\$?id below its root|could not end"):
        StructuredOutputsParams(json=schema)


def test_a_pointer_may_have_escapes_and_a_root_an_id() -> None:
    schema = {
        "$id": "http://x/y",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"a b": {"const": 1}},
        "properties": {"$ref": {"$ref": "#/$defs/a%20b"}},
    }
    assert accepts('{"$ref": 1}', json=schema) and not accepts('{"$ref": 2}', json=schema)


@pytest.mark.case("SEC-10")
def test_legal_recursion_works() -> None:
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": {"type": "integer"}, "children": {"$ref": "#/$defs/nodes"}},
                "required": ["value", "children"],
                "additionalProperties": False,
            },
            "nodes": {"type": "array", "items": {"$ref": "#/$defs/node"}},
        },
        "$ref": "#/$defs/node",
    }
    leaf = {"value": 1, "children": []}
    assert accepts(json.dumps({"value": 2, "children": [leaf, leaf]}), json=tree)
    assert not accepts(json.dumps({"value": 2, "children": [1]}), json=tree)
    link = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert accepts('{"next": {"next": null}}', json=link | {"required": ["next"]})


def test_params_take_nothing_else() -> None:
    with pytest.raises(ValueError, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="end-of-sequence token"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")).validate_for(100, ())
    for words in ("a", [""], [" "], [1], ["a"] * 257, ["x" * 257], ["\ud800"]):
        with pytest.raises(ValueError, match=r"^bad_words"):
            SamplingParams(bad_words=words)  # type: ignore[arg-type]
