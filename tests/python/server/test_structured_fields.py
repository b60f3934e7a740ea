"""The request fields that say what an output must be, and bad_words."""

from typing import Any

import pytest

from server.client import Client, refused
from vllm_lite.sampling_params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True, "description": "d"}


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text", "json_schema": None, "x": 1}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, {"json": {}}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": "{}", "regex": None}}, {"json": "{}"}),
        ({"structured_outputs": {"regex": "a|b"}}, {"regex": "a|b"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        (
            {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}},
            {"choice": ["a"]},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_json": None, "response_format": None}, None),
    ],
)
def test_each_field_says_what_the_output_must_be(
    client: Client, endpoint: str, fields: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    response = getattr(client, endpoint)(**fields)
    assert response.status_code == 200, response.text
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert client.engine.calls[0].params.structured_outputs == wanted


@pytest.mark.case("SOT-01")
@pytest.mark.case("SOT-03")
@pytest.mark.case("SEC-10")
@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs", "regex"),
        ({"guided_regex": "(?P<"}, "guided_regex", "guided_regex"),
        ({"guided_grammar": 'foo: "a"'}, "guided_grammar", "guided_grammar"),
        ({"guided_json": {"type": "nope"}}, "guided_json", "nope"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "could not end"),
        ({"guided_choice": []}, "guided_choice", "list of 1"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "guided_choice[1]"),
        ({"guided_choice": "a"}, "guided_choice", "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "only"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "not supported"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "only one"),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "response_format",
            "guided_json and response_format",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {}}, "response_format", "type"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": NAMED | {"schema": {"not": {}}},
                }
            },
            "response_format",
            "response_format.json_schema.schema",
        ),
        ({"bad_words": [""]}, "bad_words[0]", "1 to 256 characters"),
        ({"bad_words": "a"}, "bad_words", "bad_words"),
        ({"bad_words": [" "]}, "bad_words", "white space"),
        ({"bad_words": ["a"] * 257}, "bad_words", "256"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_scheduled(
    client: Client, endpoint: str, fields: dict[str, Any], param: str, words: str
) -> None:
    refused(getattr(client, endpoint)(**fields), 400, param, words)
    assert client.engine.calls == []
    assert getattr(client, endpoint)(guided_regex="a").status_code == 200


def test_bad_words_reach_the_engine(client: Client) -> None:
    assert client.complete(bad_words=["a", " b c"]).status_code == 200
    assert client.engine.calls[0].params.bad_words == ["a", " b c"]
