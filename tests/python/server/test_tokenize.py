"""/tokenize and /detokenize."""

from typing import Any

import pytest

from server.client import Client, refused
from server.fakes import VOCAB_SIZE

TURNS = {"messages": [{"role": "user", "content": "Hi"}]}


def tokenize(client: Client, **fields: Any) -> Any:
    response = client.post("/tokenize", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.case("TOK-06")
@pytest.mark.parametrize(
    "flags", [{}, {"add_generation_prompt": False}, {"truncate_prompt_tokens": 5}]
)
def test_ids_and_counts_are_those_of_generation(client: Client, flags: dict[str, Any]) -> None:
    told = tokenize(client, **TURNS, **flags)
    usage = client.chat(**TURNS, **flags).json()["usage"]
    assert told["tokens"] == client.engine.calls[-1].prompt
    assert told["count"] == usage["prompt_tokens"] == len(told["tokens"])
    assert told["max_model_len"] == client.engine.config.max_model_len


@pytest.mark.case("TOK-06")
def test_text_comes_back_exactly(client: Client) -> None:
    text = "naïve → 日本語 \n"
    told = tokenize(client, prompt=text)
    assert told == {
        "count": len(text.encode()),
        "max_model_len": 256,
        "tokens": list(text.encode()),
        "token_strs": None,
    }
    client.complete(prompt=text)
    assert client.engine.calls[0].prompt == told["tokens"]
    back = client.post("/detokenize", json={"tokens": told["tokens"], "model": "alias"})
    assert back.json() == {"prompt": text}


def test_texts_of_tokens_come_when_asked_for(client: Client) -> None:
    told = tokenize(client, prompt="aé", messages=None, return_token_strs=True)
    assert told["token_strs"] == ["a", "�", "�"]


def test_a_prompt_longer_than_the_context_is_counted(client: Client) -> None:
    assert tokenize(client, prompt="x" * 1000)["count"] == 1000
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "x"}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/tokenize", TURNS | {"chat_template": "x"}, "chat_template"),
        ("/tokenize", TURNS | {"audio": {}}, "audio"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ],
)
def test_bad_requests_are_refused_by_name(
    client: Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = refused(client.post(path, json=fields), 400)
    assert error["param"].startswith(param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_is_not_found(client: Client, path: str) -> None:
    body = {"prompt": "a", "tokens": [1], "model": "other"}
    assert refused(client.post(path, json=body), 404)["code"] == "model_not_found"
