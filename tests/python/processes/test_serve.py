"""The server as its users see it: openai's client and SmolLM2, plain HTTP and a tiny model."""

import concurrent.futures
import http.client as http_client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from processes.server_process import ServerProcess, metrics, stream
from tiny_model import EOS, VOCAB_SIZE, forced
from vllm_lite.model_files import ModelFiles, find_model
from vllm_lite.tokenizer import Tokenizer, load_tokenizer
from waiting import wait_until

MODEL = "smollm2"


def serve(directory: Path, *arguments: str) -> Iterator[ServerProcess]:
    made = ServerProcess(directory, *arguments)
    try:
        yield made.wait_ready()
        made.signal(signal.SIGTERM)
        assert made.wait() == 0, made.log()
    finally:
        made.close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """To SmolLM2. Answers of this model are slow on two cores: few and short ones."""
    options = ("--dtype", "float32", "--max-model-len", "1024", "--threads", "1")
    for server in serve(tmp_path_factory.mktemp("smollm2"), MODEL, *options):
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="unused", max_retries=0, http_client=httpx.Client()
        ) as made:
            yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[ServerProcess]:
    """Of the tiny model, in float32: a greedy choice does not depend on the rows of a product."""
    options = ("--threads", "1", "--max-model-len", "30000", "--served-model-name", "tiny")
    yield from serve(tmp_path_factory.mktemp("tiny"), tiny_model, *options)


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat_streams_what_it_answers_plainly(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    plain = client.chat.completions.create(**options, max_tokens=24)
    chunks = list(
        client.chat.completions.create(
            **options, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    text = plain.choices[0].message.content
    assert text is not None and "Paris" in text
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == [plain.choices[0].finish_reason]
    assert plain.choices[0].finish_reason in ("stop", "length")
    assert len(chunks) > 2  # how many: tokens that wait for the API server go together
    assert chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens <= 24
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens == 37
    assert plain.usage.total_tokens == 37 + plain.usage.completion_tokens


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.case("TCL-01")
@pytest.mark.case("TCL-06")
def test_a_demanded_call_is_made(client: openai.OpenAI) -> None:
    """By a model that was never taught to, and cut short by the length."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": [WEATHER],
        "parallel_tool_calls": False,
    }
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        for temperature in (0, 1):
            answer = client.chat.completions.create(
                **options, tool_choice=choice, temperature=temperature, max_tokens=300, seed=1
            ).choices[0]
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            (call,) = answer.message.tool_calls or ()
            assert call.function.name == "get_weather"
            arguments = json.loads(call.function.arguments)
            assert set(arguments) == {"city", "unit"} and len(arguments["city"]) <= 12
            assert arguments["unit"] in ("celsius", "fahrenheit")
    chunks = list(
        client.chat.completions.create(
            **options,
            tool_choice=named,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
    assert chunks[-2].choices[0].finish_reason == "length"
    calls = [call for chunk in chunks[:-1] for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "get_weather" and calls[0].id
    assert "".join(call.function.arguments for call in calls).startswith("{")


def test_completion_with_n_stop_and_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "One, two, three, four,", "max_tokens": 12}
    plain = client.completions.create(**options, temperature=0, logprobs=2)
    text = plain.choices[0].text
    assert "five" in text and "six" in text
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == text and len(logprobs.tokens) == 12
    assert logprobs.token_logprobs is not None and all(
        value is not None and value <= 0 for value in logprobs.token_logprobs
    )
    stopped = client.completions.create(**options, temperature=0, stop=["six"])
    assert stopped.choices[0].text == text[: text.index("six")]
    assert stopped.choices[0].finish_reason == "stop"
    two = client.completions.create(**options, n=2, temperature=1, seed=1)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text != two.choices[1].text
    assert two.usage is not None and two.usage.completion_tokens <= 24
    streamed: dict[int, str] = {0: "", 1: ""}
    for chunk in client.completions.create(**options, n=2, temperature=1, seed=1, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {choice.index: choice.text for choice in two.choices}


def test_models_of_the_server(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    extra = client.models.retrieve(MODEL).model_extra
    assert extra is not None and extra["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="a")


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert set(http.get("/version").json()) == {"version"}


def test_bad_requests_are_400_and_harm_nobody(http: httpx.Client) -> None:
    with stream(http, max_tokens=500) as good:
        next(good)
        for body in (
            {"prompt": [1, VOCAB_SIZE, 5]},
            {"prompt": ""},
            {"prompt": [5] * 30000},
            {"prompt": "a", "max_tokens": 30000},
            {"prompt": "a", "priority": 2**40},
            {"prompt": "a", "logit_bias": {"999999": 5}},
            {"prompt": "a", "stop_token_ids": [-1]},
            {"prompt": "a", "n": 5000},
        ):
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 400, (body, answer.text)
            assert answer.json()["error"]["message"]
        assert list(good)[-1] == "[DONE]"
    assert http.get("/health").status_code == 200


@pytest.mark.case("MET-03")
def test_metrics_count_and_come_back_to_zero(server: ServerProcess, http: httpx.Client) -> None:
    with stream(http, max_tokens=25000, n=2) as running:
        while next(running)["choices"][0]["index"] == 0:
            pass  # the second sample begins a step after the first
        with server.stand_still():
            now = metrics(http)
    assert now["vllm_lite:num_requests_running"] == 2
    assert 0 < now["vllm_lite:kv_cache_usage_perc"] < 1
    server.wait_idle(http)
    before = metrics(http)
    with stream(http, max_tokens=500, n=2) as whole:
        *_, last = whole
    assert last == "[DONE]"
    server.wait_idle(http)
    after = metrics(http)
    name = "vllm_lite:generation_tokens_total"
    assert after[name] - before[name] == 1000
    assert after["vllm_lite:time_to_first_token_seconds_count"] > 0


@pytest.mark.case("ABT-01")
@pytest.mark.parametrize("streamed", [True, False])
def test_client_that_goes_away_frees_its_blocks(
    server: ServerProcess, http: httpx.Client, streamed: bool
) -> None:
    body = {"prompt": "Once", "max_tokens": 25000, "ignore_eos": True, "n": 4, "stream": streamed}
    server.wait_idle(http)
    name = "vllm_lite:generation_tokens_total"
    before = metrics(http)[name]
    with server.client() as leaving:
        if streamed:
            with leaving.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body, timeout=0.5)
    server.wait_idle(http)
    assert metrics(http)[name] - before < 4 * 25000


@pytest.mark.case("ABT-06")
def test_client_that_goes_away_frees_the_blocks_of_its_inputs(
    server: ServerProcess, http: httpx.Client
) -> None:
    """64 long inputs, most of which are not computed when it leaves."""
    server.wait_idle(http)
    before = metrics(http)["vllm_lite:prompt_tokens_total"]
    inputs = [[i + 2] * 10_000 for i in range(64)]
    leaving = http_client.HTTPConnection("127.0.0.1", server.port)
    leaving.request("POST", "/v1/embeddings", json.dumps({"input": inputs}))
    wait_until(lambda: metrics(http)["vllm_lite:num_requests_running"] > 0)
    leaving.close()
    server.wait_idle(http)
    assert metrics(http)["vllm_lite:prompt_tokens_total"] - before < 32 * 10_000


GREEDY = {"temperature": 0, "ignore_eos": True}


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """The only choice of a plain answer."""
    answer = http.post("/v1/completions", json={"prompt": "The quick", **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def stream_choices(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, in order."""
    with stream(http, **body) as running:
        *chunks, done = running
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.case("STR-01")
@pytest.mark.parametrize("max_tokens", [1, 2, 10])
def test_the_chunk_that_ends_a_stream_loses_no_token(http: httpx.Client, max_tokens: int) -> None:
    plain = complete(http, max_tokens=max_tokens, logprobs=0)
    assert len(plain["logprobs"]["tokens"]) == max_tokens
    choices = stream_choices(http, max_tokens=max_tokens, logprobs=0)
    assert "".join(choice["text"] for choice in choices) == plain["text"]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert tokens == plain["logprobs"]["tokens"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["length"]


@pytest.mark.case("STP-01", "STP-03", "STP-05")
def test_no_part_of_a_stop_string_is_streamed(http: httpx.Client) -> None:
    letters = {
        "max_tokens": 40,
        "allowed_token_ids": list(range(30, 90)),
        "repetition_penalty": 1.1,
    }
    plain = complete(http, **letters, logprobs=0)
    text, tokens = plain["text"], plain["logprobs"]["tokens"]
    assert set(map(len, tokens)) == {1}
    begin = next(i for i in range(10, 30) if text.index(text[i : i + 3]) == i)
    stop = text[begin : begin + 3]  # of three tokens
    almost = text[begin - 4 : begin] + "\n"  # held back for a while, and let out
    for include in (False, True):
        body = {**letters, "stop": [almost, stop], "include_stop_str_in_output": include}
        choices = stream_choices(http, **body)
        expected = text[: begin + 3 if include else begin]
        assert "".join(choice["text"] for choice in choices) == expected
        stopped = complete(http, **body)
        assert stopped["text"] == expected
        for choice in (choices[-1], stopped):
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    choices = stream_choices(http, **letters, stop=[almost])
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.case("STP-03", "STP-05")
def test_chat_ends_with_openais_reasons_and_without_the_stops_text(http: httpx.Client) -> None:
    def chat(**body: Any) -> tuple[str, str, Any]:
        messages = [{"role": "user", "content": "the dog"}]
        answer = http.post(
            "/v1/chat/completions", json={"messages": messages, **GREEDY, "max_tokens": 30, **body}
        )
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]

    letters = {"allowed_token_ids": list(range(30, 90)), "repetition_penalty": 1.1}
    text, *reasons = chat(**letters)
    assert reasons == ["length", None]
    word = text[12:15]
    assert chat(**letters, stop=["never there", word]) == (text[: text.index(word)], "stop", word)
    assert chat(logit_bias={str(EOS): 100}, ignore_eos=False) == ("", "stop", None)
    assert chat(logit_bias={"53": 100}, stop_token_ids=[53]) == ("", "stop", 53)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str) -> Tokenizer:
    return load_tokenizer(ModelFiles(Path(tiny_model)))


def bytes_as_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    single = {tokenizer.token_bytes(i): i for i in range(EOS + 1, 300)}
    return [single[bytes([byte])] for byte in data]


@pytest.mark.case("TOK-01", "LPR-03")
@pytest.mark.parametrize("text", ["😀", "語", "ď", "x“é"])
def test_characters_cut_into_bytes_are_streamed_whole(
    http: httpx.Client, tokenizer: Tokenizer, text: str
) -> None:
    ids = bytes_as_tokens(tokenizer, text.encode())
    assert tokenizer.decode(ids) == text
    choices = stream_choices(http, prompt="12345", **forced(ids), n=2)
    for index in (0, 1):
        deltas = [choice["text"] for choice in choices if choice["index"] == index]
        assert "".join(deltas) == text and not any("\ufffd" in delta for delta in deltas)
    messages = [{"role": "user", "content": "12345"}]
    body = {"messages": messages, **forced(ids), "logprobs": True, "top_logprobs": 5}
    answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert answer["message"]["content"] == text
    entries = answer["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    for entry in entries:
        assert len(entry["top_logprobs"]) == 5
        for other in entry["top_logprobs"]:
            # Each by itself: a part of a character is U+FFFD. Only padded ids are without bytes.
            assert other["token"] == bytes(other["bytes"]).decode(errors="replace")
        assert any(other["bytes"] for other in entry["top_logprobs"])


@pytest.mark.case("TOK-01")
@pytest.mark.parametrize("text", [" ď", " 😀"])
def test_a_space_and_a_part_of_a_character_in_one_token(client: openai.OpenAI, text: str) -> None:
    """SmolLM2 has such tokens."""
    tokenizer = load_tokenizer(find_model(MODEL))
    *begin, end = text.encode()
    ids = [
        next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == part)
        for part in (bytes(begin), bytes([end]))
    ]
    chunks = client.completions.create(
        model=MODEL, prompt="One, two", stream=True, n=2, extra_body=forced(ids)
    )
    deltas = [(chunk.choices[0].index, chunk.choices[0].text) for chunk in chunks]
    for index in (0, 1):
        assert "".join(delta for of, delta in deltas if of == index) == text
    assert not any("\ufffd" in delta for _, delta in deltas)


MIXED: list[dict[str, Any]] = [
    {"prompt": "The quick brown fox"},
    {"prompt": "lazy dog", "temperature": 0.8, "seed": 7},
    {"prompt": "def f(x):", "allowed_token_ids": [*range(30, 90)], "stop": ["a", "b", "c"]},
    {"prompt": "12345", "logprobs": 2},
    {"prompt": "for i in range", "n": 2, "temperature": 1.0, "seed": 3},
    {"prompt": "jumps over", "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"prompt": "Größe", "logit_bias": {"53": 100.0}},
    {"prompt": "it is", "min_tokens": 6, "logit_bias": {str(EOS): 100.0}, "ignore_eos": False},
    {"prompt": "what they", "repetition_penalty": 1.3},
    {"prompt": "have said", "top_k": 5, "temperature": 1.0, "seed": 9},
    {"prompt": "東京", "max_tokens": 3},
    {"prompt": "dog, and " * 200, "max_tokens": 4},
    {"prompt": ["return x", "print(f(i))"]},
    {"prompt": [54, 357, 282], "top_p": 0.9, "temperature": 0.7, "seed": 1},
    {"prompt": "café", "n": 3, "min_p": 0.02, "temperature": 1.0, "seed": 2},
    {"prompt": "首都", "stop_token_ids": [*range(100)]},
]


@pytest.mark.case("SMP-08")
def test_sixteen_mixed_requests_at_once_equal_their_solo_runs(http: httpx.Client) -> None:
    def ask(index: int) -> list[tuple[str, str]]:
        """(text, finish reason) of every choice; odd ones are streamed."""
        body = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, **MIXED[index]}
        body["stream"] = index % 2 == 1
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if index % 2 == 0:
            return [(c["text"], c["finish_reason"]) for c in answer.json()["choices"]]
        found: dict[int, list[str]] = {}
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        for line in lines[:-1]:
            for choice in json.loads(line)["choices"]:
                parts = found.setdefault(choice["index"], ["", ""])
                parts[0] += choice["text"]
                parts[1] += choice["finish_reason"] or ""
        return [(text, reason) for _, (text, reason) in sorted(found.items())]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    for index, answer in enumerate(together):
        assert answer == ask(index), MIXED[index]
