"""A server with little room, of a model that fails and has no chat template: what one request
meets, the others do not.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from processes.server_process import ServerProcess, metrics, stream
from processes.test_serve import serve
from tiny_model import block_bytes, forced, make_tiny_model

MAX_MODEL_LEN = 256
BLOCK = 16
POOL_BLOCKS = 40
POISON = 350  # a token whose embedding is NaN: what reads it has no finite logits


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "poisoned")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    fields = json.loads((model / "tokenizer_config.json").read_text())
    del fields["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(fields))
    options = (
        "--threads", "1", "--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK),
        "--kv-cache-memory", str(POOL_BLOCKS * block_bytes(BLOCK)), "--max-num-seqs", "8",
        "--served-model-name", "tiny",
    )  # fmt: skip
    yield from serve(tmp_path_factory.mktemp("limits"), str(model), *options)


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})


@pytest.mark.case("LEN-01", "LEN-05")
@pytest.mark.parametrize("streamed", [False, True])
def test_prompts_at_the_limit_of_the_context(http: httpx.Client, streamed: bool) -> None:
    with stream(http, max_tokens=240) as other:
        next(other)
        for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10_000):
            answer = post(http, prompt=[5] * length, max_tokens=3, stream=streamed)
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            for number in (length, MAX_MODEL_LEN, 3):
                assert str(number) in message
        for length, room in ((255, 1), (250, 6)):
            answer = post(http, prompt=[5] * length).json()
            assert answer["usage"]["completion_tokens"] == room
            assert answer["choices"][0]["finish_reason"] == "length"
        *_, last, done = other
    assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"


@pytest.mark.case("NUM-18")
def test_without_a_chat_template_chat_says_how_to_give_one(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "the dog"}]}
    for streamed in (False, True):
        answer = http.post("/v1/chat/completions", json={**body, "stream": streamed})
        assert answer.status_code == 400
        assert "--chat-template" in answer.json()["error"]["message"]
    assert post(http, prompt="the dog", max_tokens=3).status_code == 200


def ended(http: httpx.Client) -> dict[str, float]:
    """How many requests have ended, by the reason."""
    return {
        sample.labels["finished_reason"]: sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "vllm_lite:request_success_total"
    }


@pytest.mark.case("STR-03", "WRK-03", "KVA-03", "MET-03")
def test_a_failure_in_the_middle_of_a_stream_is_told_and_is_the_requests_own(
    server: ServerProcess, http: httpx.Client
) -> None:
    harmless = {"prompt": "The quick", **forced([300, 301, 302, 303, POISON])}
    text_before = post(http, **harmless).json()["choices"][0]["text"]
    before = ended(http)
    fails = {**harmless, "max_tokens": 20}
    with stream(http, max_tokens=200) as other:
        first = next(other)
        with stream(http, **fails) as failing:
            *chunks, last = failing
        answer = post(http, **fails)
        assert answer.status_code == 500 and "no finite logits" in answer.text
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            received = []
            with pytest.raises(openai.APIError, match="no finite logits"):
                for chunk in client.completions.create(
                    model="tiny", prompt="The quick", stream=True, extra_body=fails
                ):
                    received.append(chunk.choices[0])
        *rest, done = other
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "no finite logits" in last["error"]["message"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_before
    assert "".join(choice.text for choice in received) == text_before
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert all(choice.finish_reason is None for choice in received)
    # The one beside it is what it is alone.
    assert done == "[DONE]"
    text = "".join(chunk["choices"][0]["text"] for chunk in (first, *rest))
    assert text == post(http, prompt="The quick", max_tokens=200).json()["choices"][0]["text"]
    # Of as many samples as do not fit at once, so that it leaves long before all is there.
    with server.client() as leaving, stream(leaving, max_tokens=240, n=8) as left:
        next(left)
    server.wait_idle(http)
    after = ended(http)
    assert {reason: after[reason] - before[reason] for reason in after} == {
        "stop": 0, "length": 2, "error": 3, "abort": 1,
    }  # fmt: skip


@pytest.mark.case("USG-06")
def test_cached_tokens_cold_warm_after_eviction_and_after_preemption(
    server: ServerProcess, http: httpx.Client
) -> None:
    def cached(prompt: list[int], **body: Any) -> int:
        usage = post(http, prompt=prompt, max_tokens=2, **body).json()["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    prompt = [310 + i % 30 for i in range(100)]
    assert cached(prompt) == 0
    assert cached(prompt) == 96
    assert cached(prompt[:96]) == 80
    for other in range(4):  # together more than the pool
        assert cached([100 + other, *range(10, 250)]) == 0
    assert cached(prompt) == 0

    # Six of 32 + 200 tokens in 640: all but the first are preempted and begin anew.
    name = "vllm_lite:num_preemptions_total"
    server.wait_idle(http)
    preemptions = metrics(http)[name]
    own = [[200 + index, *range(20, 51)] for index in range(6)]
    usage = post(http, prompt=own, max_tokens=200).json()["usage"]
    assert metrics(http)[name] > preemptions
    assert usage["prompt_tokens"] == 6 * 32 and usage["completion_tokens"] == 6 * 200
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
