"""Log-probabilities in both endpoints' shapes."""

import json
import math

import pytest

from server.client import Client, events, refused
from server.fakes import EOS, Script


@pytest.mark.case("LPR-01")
def test_chat_entries_are_openais(client: Client) -> None:
    choice = client.chat(logprobs=True, top_logprobs=3, max_tokens=2).json()["choices"][0]
    assert set(choice["logprobs"]) == {"content", "refusal"}
    first, second = choice["logprobs"]["content"]
    assert set(first) == {"token", "logprob", "bytes", "top_logprobs"}
    assert (first["token"], first["logprob"], first["bytes"]) == ("H", -0.25, [72])
    assert first["top_logprobs"] == [
        {"token": "H", "logprob": -0.25, "bytes": [72]},
        {"token": "I", "logprob": -2.0, "bytes": [73]},
        {"token": "J", "logprob": -3.0, "bytes": [74]},
    ]
    assert second["token"] == "e"


@pytest.mark.case("LPR-01")
def test_chat_without_alternatives(client: Client) -> None:
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        body = client.chat(**fields).json()
        content = body["choices"][0]["logprobs"]["content"]
        assert len(content) == body["usage"]["completion_tokens"]
        assert all(entry["top_logprobs"] == [] for entry in content)
    refused(client.chat(top_logprobs=2), 400, "top_logprobs")
    refused(client.chat(logprobs=False, top_logprobs=2), 400, "top_logprobs")
    refused(client.chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "20", "21")
    refused(client.chat(logprobs=3), 400, "logprobs")
    refused(client.complete(logprobs=21), 400, "logprobs", "20")
    refused(client.complete(logprobs=True), 400, "logprobs")


def test_alternatives_are_ranked_and_exclude_a_chosen_token_below_them(client: Client) -> None:
    client.engine.script = Script("A", logprob=-9.0, top={67: -1.0, 66: -0.5, 68: -2.0})
    entry = client.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [t["token"] for t in entry[0]["top_logprobs"]] == ["B", "C"]
    assert (entry[0]["token"], entry[0]["logprob"]) == ("A", -9.0)
    # The older endpoint adds the chosen token to its map.
    old = client.complete(logprobs=2).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert list(old.items()) == [("B", -0.5), ("C", -1.0), ("A", -9.0)]


@pytest.mark.case("LPR-03")
def test_parts_of_a_character_have_their_own_bytes(client: Client) -> None:
    text = "“é😀”"
    client.engine.script = Script(text)
    body = client.chat(logprobs=True, top_logprobs=5).json()
    content = body["choices"][0]["logprobs"]["content"]
    joined = bytes(byte for entry in content for byte in entry["bytes"])
    assert joined.decode() == text == body["choices"][0]["message"]["content"]
    assert {entry["token"] for entry in content} == {"\ufffd"}
    for entry in content:
        assert all(alternative["token"] for alternative in entry["top_logprobs"])

    logprobs = client.complete(logprobs=0).json()["choices"][0]["logprobs"]
    # Characters count where they are complete: 3 bytes, 2, 4, 3.
    assert logprobs["text_offset"] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3]


@pytest.mark.case("LPR-10")
def test_special_and_padded_tokens_have_text_and_bytes(client: Client) -> None:
    client.engine.script = Script(tokens=[72, EOS, 105], top={EOS: -0.5, 299: -1.0})
    content = client.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert (content[1]["token"], content[1]["bytes"]) == ("</s>", list(b"</s>"))
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    padded = [t for t in content[1]["top_logprobs"] if t["logprob"] == -1.0]
    assert padded == [{"token": "", "logprob": -1.0, "bytes": []}]

    plain = client.complete(logprobs=0).json()["choices"][0]
    assert plain["text"] == "Hi"
    assert plain["logprobs"]["text_offset"] == [0, 1, 1]
    shown = client.complete(logprobs=0, skip_special_tokens=False).json()["choices"][0]
    assert shown["text"] == "H</s>i"
    assert shown["logprobs"]["text_offset"] == [0, 1, 5]


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_infinities_become_the_floor_and_finite_values_stay(client: Client, value: float) -> None:
    client.engine.script = Script("A", top={66: value, 67: -12345.5})

    def strict(text: str) -> object:
        def no(constant: str) -> None:
            raise AssertionError(constant)

        return json.loads(text, parse_constant=no)

    chat = strict(client.chat(logprobs=True, top_logprobs=3).text)
    top = chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]  # type: ignore[index]
    assert {t["token"]: t["logprob"] for t in top} == {"A": -0.25, "B": -9999.0, "C": -12345.5}
    old = strict(client.complete(logprobs=3).text)
    assert old["choices"][0]["logprobs"]["top_logprobs"][0]["B"] == -9999.0  # type: ignore[index]


@pytest.mark.parametrize("per_output", [1, 4])
def test_streamed_entries_join_to_the_plain_ones(client: Client, per_output: int) -> None:
    client.engine.script = Script("añ€ b", per_output=per_output)
    fields = {"n": 2, "max_tokens": 8}
    plain = client.complete(logprobs=2, **fields).json()["choices"]
    chunks = [c["choices"][0] for c in events(client.complete(logprobs=2, stream=True, **fields))]
    for index in range(2):
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [x for c in chunks if c["index"] == index for x in c["logprobs"][key]]
            assert joined == plain[index]["logprobs"][key], key
            assert len(joined) == 8

    plain = client.chat(logprobs=True, top_logprobs=1, **fields).json()["choices"]
    chunks = [
        c["choices"][0]
        for c in events(client.chat(logprobs=True, top_logprobs=1, stream=True, **fields))
    ]
    for index in range(2):
        joined = [
            entry
            for c in chunks
            if c["index"] == index and c["logprobs"]
            for entry in c["logprobs"]["content"]
        ]
        assert joined == plain[index]["logprobs"]["content"]


def test_tokens_of_one_text_do_not_hide_the_likelier(client: Client) -> None:
    client.engine.script = Script(tokens=[0xC3, 65], top={0xE2: -0.1, 0xF0: -5.0})
    top = client.complete(logprobs=3).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert top[0] == {"\ufffd": -0.1}


def test_ids_in_place_of_texts(client: Client) -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    old = client.complete(logprobs=1, **fields).json()["choices"][0]["logprobs"]
    assert old["tokens"] == ["token_id:72"]
    assert list(old["top_logprobs"][0]) == ["token_id:72"]
    new = client.chat(logprobs=True, top_logprobs=2, **fields).json()["choices"][0]["logprobs"]
    assert [t["token"] for t in new["content"][0]["top_logprobs"]] == ["token_id:72", "token_id:73"]


def test_large_answers_are_whole(client: Client) -> None:
    client.engine.script = Script("abc", ends=False)
    body = client.complete(logprobs=20, n=4, max_tokens=200).json()  # rendered in a thread
    assert [len(c["logprobs"]["tokens"]) for c in body["choices"]] == [200] * 4
