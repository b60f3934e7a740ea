"""The prompt's own text and log-probabilities: ``echo`` and ``prompt_logprobs``."""

import json
from typing import Any

import pytest

from server.client import Client, events, refused
from server.fakes import BOS, MASKED, prompt_logprob
from vllm_lite.server import sampling


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The choice that a stream's chunks make together."""
    parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
    reasons = [part["finish_reason"] for part in parts if part["finish_reason"] is not None]
    assert len(reasons) == 1
    out = dict(parts[-1], text="".join(part["text"] for part in parts))
    if parts[0]["logprobs"] is not None:
        names = parts[0]["logprobs"]
        out["logprobs"] = {
            name: [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            for name in names
        }
    return out


def test_chat_echoes_the_assistants_last_message(client: Client) -> None:
    parts = [{"type": "text", "text": text} for text in ("Well", "then:")]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]
    fields = {"messages": turns, "continue_final_message": True, "n": 2, "echo": True}
    answer = client.chat(**fields).json()
    assert [c["message"]["content"] for c in answer["choices"]] == ["Well\nthen:Hello, world"] * 2
    chunks = events(client.chat(**fields, stream=True))
    for index in range(2):
        deltas = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        text = "".join(choice["delta"].get("content", "") for choice in deltas)
        assert text == "Well\nthen:Hello, world"
    for silent in ({"echo": False}, {"messages": turns[:1], "continue_final_message": False}):
        answer = client.chat(**fields | silent).json()
        assert answer["choices"][0]["message"]["content"] == "Hello, world"


@pytest.mark.case("API-11")
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_streamed_echo_is_the_plain_one(
    client: Client, logprobs: int | None, n: int, max_tokens: int
) -> None:
    client.engine.script.ends = False
    fields = {"echo": True, "logprobs": logprobs, "n": n, "max_tokens": max_tokens,
              "prompt": ["naïve", "hi"]}  # fmt: skip
    plain = client.complete(**fields).json()["choices"]
    assert [choice["text"] for choice in plain] == [
        prompt + "Hello, world"[:max_tokens] for prompt in ("naïve", "hi") for _ in range(n)
    ]
    chunks = events(client.complete(**fields, stream=True))
    for choice in plain:
        assert choice["finish_reason"] == "length"
        assert joined(chunks, choice["index"]) == choice


@pytest.mark.case("LPR-06")
def test_echo_has_an_entry_for_every_token_of_the_prompt(client: Client) -> None:
    prompt = "abcdefgh"
    body = client.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [*prompt, "H"]
    assert logprobs["token_logprobs"] == [None, *map(prompt_logprob, prompt[1:].encode()), -0.25]
    assert logprobs["top_logprobs"][0] is None
    # The likeliest, and the prompt's own.
    assert logprobs["top_logprobs"][1] == {"\x05": -0.5, "b": prompt_logprob(ord("b"))}
    assert logprobs["text_offset"] == list(range(9))
    assert body["usage"]["completion_tokens"] == 1
    assert client.engine.calls[0].params.prompt_logprobs == 1


def test_offsets_count_characters_of_the_text_as_it_was_given(client: Client) -> None:
    # The tokenizer's BOS is not in the text, a special token that the prompt names is.
    client.engine.tokenizer.encode = lambda text, add_special_tokens=True: (  # type: ignore[method-assign]
        [BOS, *"é".encode(), BOS, ord("z")]
    )
    choice = client.complete(prompt="é<s>z", echo=True, logprobs=0, max_tokens=1).json()["choices"]
    assert choice[0]["text"] == "é<s>zH"
    logprobs = choice[0]["logprobs"]
    assert logprobs["tokens"] == ["<s>", "�", "�", "<s>", "z", "H"]
    assert logprobs["text_offset"] == [0, 0, 0, 1, 4, 5]


@pytest.mark.case("LPR-05")
def test_an_impossible_token_of_the_prompt_is_sent_as_the_floor(client: Client) -> None:
    fields = {"prompt": [5, MASKED, 9], "echo": True, "logprobs": 1, "max_tokens": 1}
    response = client.complete(**fields, temperature=1, top_k=1)
    body = json.loads(response.text, parse_constant=lambda name: pytest.fail(name))
    values = body["choices"][0]["logprobs"]["token_logprobs"]
    assert values == [None, -9999.0, prompt_logprob(9), -0.25]
    whole = client.complete(prompt=[5, MASKED], prompt_logprobs=0, max_tokens=1)
    entry = whole.json()["choices"][0]["prompt_logprobs"][1][str(MASKED)]
    assert entry["logprob"] == -9999.0


def test_prompt_logprobs_of_both_endpoints_are_vllms(client: Client) -> None:
    expected = [
        None,
        {
            "98": {"logprob": prompt_logprob(98), "rank": 30, "decoded_token": "b"},
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "\x05"},
            "6": {"logprob": -1.5, "rank": 2, "decoded_token": "\x06"},
        },
    ]
    body = client.complete(prompt="ab", prompt_logprobs=2, max_tokens=0).json()
    assert body["choices"][0]["prompt_logprobs"] == expected
    assert body["choices"][0]["text"] == ""
    # With more alternatives for the echo, no more of them are shown here.
    body = client.complete(prompt="ab", prompt_logprobs=2, echo=True, logprobs=5).json()
    assert body["choices"][0]["prompt_logprobs"] == expected
    assert len(body["choices"][0]["logprobs"]["top_logprobs"][1]) == 5
    answer = client.chat(prompt_logprobs=0, max_tokens=2).json()
    prompt = client.engine.calls[-1].prompt
    assert answer["prompt_logprobs"][0] is None
    assert [next(iter(entry)) for entry in answer["prompt_logprobs"][1:]] == [
        str(token) for token in prompt[1:]
    ]
    assert "prompt_logprobs" not in client.chat(max_tokens=2).json()
    assert "prompt_logprobs" not in client.complete().json()["choices"][0]


@pytest.mark.case("SEC-03")
@pytest.mark.parametrize("value", [-1, 300, 299, 21])
def test_more_prompt_logprobs_than_the_cap_are_refused(client: Client, value: int) -> None:
    for ask in (client.complete, client.chat):
        refused(ask(prompt_logprobs=value), 400, "prompt_logprobs", str(value), "20")
    refused(client.complete(logprobs=value), 400, "logprobs")
    assert client.engine.calls == []


@pytest.mark.case("SEC-03")
@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 20}, {"logprobs": 20, "echo": True, "n": 8}, {"logprobs": 20}]
)
def test_an_answer_has_a_bound_of_prompt_logprobs(
    client: Client, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    fields = {"prompt": [[97] * 100] * 4, "max_tokens": 1, **fields}
    copies = fields.get("n", 1)
    is_told = "prompt_logprobs" in fields or "echo" in fields
    limit = 4 * 100 * 21 * copies  # type: ignore[operator]
    monkeypatch.setattr(sampling, "MAX_PROMPT_LOGPROBS", limit)
    assert client.complete(**fields).status_code == 200
    monkeypatch.setattr(sampling, "MAX_PROMPT_LOGPROBS", limit - 1)
    answer = client.complete(**fields)
    if is_told:
        name = "prompt_logprobs" if "prompt_logprobs" in fields else "logprobs"
        refused(answer, 400, name, str(limit))
    else:
        assert answer.status_code == 200


def test_prompt_logprobs_are_not_streamed(client: Client) -> None:
    for ask in (client.complete, client.chat):
        refused(ask(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", "stream")


def test_no_tokens_can_be_asked_for_only_with_something_of_the_prompt(client: Client) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        for ask in (client.complete, client.chat):
            refused(ask(**{name: 0}), 400, name, "echo", "prompt_logprobs")
            assert ask(**{name: 0}, prompt_logprobs=0).status_code == 200
    assert client.complete(max_tokens=0, echo=True).json()["choices"][0]["text"] == "abc"


def test_special_tokens_of_an_echoed_list_of_ids_follow_skip_special_tokens(client: Client) -> None:
    fields = {"prompt": [BOS, 97], "echo": True, "max_tokens": 0}
    assert client.complete(**fields).json()["choices"][0]["text"] == "a"
    shown = client.complete(**fields, skip_special_tokens=False).json()["choices"][0]["text"]
    assert shown == "<s>a"
