"""/v1/embeddings, /score and /rerank."""

import base64
import math
import struct
from typing import Any

import pytest

from server.client import Client, refused
from server.fakes import MAX_MODEL_LEN, VOCAB_SIZE, fake_vector, prompt_logprob
from vllm_lite.errors import EngineDeadError, EngineError, QueueFullError
from vllm_lite.server.options import ServerOptions


def embed(client: Client, **fields: Any) -> Any:
    return client.post("/v1/embeddings", json={"input": "abc"} | fields)


def test_embeddings_have_openais_shape(client: Client) -> None:
    body = embed(client, user="u", nonsense=1).json()
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": fake_vector(list(b"abc"))}],
        "model": "fake",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    params = client.engine.calls[0].params
    assert (params.pooling_type, params.normalize, params.dimensions) == ("LAST", True, None)


@pytest.mark.case("EMB-01")
def test_base64_is_the_same_vector_as_float32(client: Client) -> None:
    numbers = embed(client).json()["data"][0]["embedding"]
    text = embed(client, encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<8f", base64.b64decode(text))) == numbers


@pytest.mark.case("EMB-03")
@pytest.mark.parametrize(
    "inputs", [["a", "bcd", "ef", "g" * 40, "h"], [[1], [2, 3], [4], [5, 6, 7], [8]]]
)
def test_items_of_a_batch_are_in_order_and_each_its_own(client: Client, inputs: Any) -> None:
    body = embed(client, input=inputs).json()
    assert [item["index"] for item in body["data"]] == [0, 1, 2, 3, 4]
    alone = [embed(client, input=one).json() for one in inputs]
    assert [item["embedding"] for item in body["data"]] == [
        answer["data"][0]["embedding"] for answer in alone
    ]
    assert body["usage"]["prompt_tokens"] == sum(a["usage"]["prompt_tokens"] for a in alone)
    assert len({call.request_id for call in client.engine.calls}) == len(client.engine.calls)


@pytest.mark.case("EMB-05")
@pytest.mark.parametrize("text", ["", [""], [], [[]], ["a", ""]])
def test_an_input_without_tokens_is_refused(client: Client, text: Any) -> None:
    assert refused(embed(client, input=text), 400, None, "input")["param"].startswith("input")
    assert client.engine.calls == []


def test_options_reach_the_engine(client: Client) -> None:
    body = embed(client, pooling_type="MEAN", normalize=False, dimensions=3, priority=-2).json()
    assert len(body["data"][0]["embedding"]) == 3
    call = client.engine.calls[0]
    assert (call.params.pooling_type, call.params.normalize, call.priority) == ("MEAN", False, -2)
    embed(client, input="abcdef", truncate_prompt_tokens=2)
    embed(client, input="x" * 999, truncate_prompt_tokens=-1)
    assert client.engine.calls[1].prompt == list(b"ef")
    assert len(client.engine.calls[2].prompt) == MAX_MODEL_LEN - 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("input", [None, 1, {}, [1.5], [VOCAB_SIZE], [-1], ["a", [1]], ["a"] * 2049, "x" * 999]),
        ("encoding_format", ["int8", 1, []]),
        ("dimensions", [0, -1, 9, 1.5, "4", True]),
        ("truncate_prompt_tokens", [0, -2, MAX_MODEL_LEN, "1"]),
        ("pooling_type", ["CLS", "last", 1]),
        ("normalize", [1, "true"]),
        ("model", [1, "gpt"]),
        ("priority", [2**31, "1"]),
        ("user", [1]),
    ],
)
def test_wrong_types_and_ranges_are_refused_by_name(
    client: Client, field: str, values: list[Any]
) -> None:
    for value in values:
        response = embed(client, **{field: value})
        error = refused(response, 404 if value == "gpt" else 400, None, field)
        assert (error["param"] or "").startswith(field), (value, error)
    assert client.engine.calls == []


def test_more_inputs_than_may_wait_take_turns(engine: Any) -> None:
    client = Client(engine, ServerOptions(max_choices=3))
    engine.script.delay = 0.01
    body = embed(client, input=[[i] for i in range(20)]).json()
    assert [item["embedding"] for item in body["data"]] == [fake_vector([i]) for i in range(20)]
    assert engine.most_running == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineDeadError("gone"), 503), (EngineError("broken"), 500), (QueueFullError("full"), 429),
     (ValueError("no"), 400)],
)  # fmt: skip
def test_the_engines_errors_have_their_status(
    client: Client, error: Exception, status: int
) -> None:
    client.engine.script.start_error = error
    refused(embed(client), status)


def mean_probability(text: str) -> float:
    values = [prompt_logprob(byte) for byte in text.encode()]
    return math.exp(sum(values) / len(values))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"),
                                   ("text_1", "text_2"), ("data_1", "data_2")])  # fmt: skip
def test_scores_are_the_mean_probability_of_the_query(
    client: Client, path: str, names: tuple[str, str]
) -> None:
    body = client.post(path, json={names[0]: "who?", names[1]: ["A", "long one"]}).json()
    assert set(body) == {"id", "object", "created", "model", "data", "usage"}
    assert body["object"] == "list"
    assert [(item["index"], item["object"]) for item in body["data"]] == [
        (0, "score"),
        (1, "score"),
    ]
    for item in body["data"]:
        assert item["score"] == pytest.approx(mean_probability(" who?"))
    prompts = [bytes(call.prompt).decode() for call in client.engine.calls]
    assert prompts == [f"Passage: {text}\nQuestion: who?" for text in ("A", "long one")]
    assert body["usage"]["total_tokens"] == sum(map(len, prompts))
    assert all(call.params.max_tokens == 0 for call in client.engine.calls)


def test_queries_and_documents_pair_up(client: Client) -> None:
    body = client.post("/score", json={"queries": ["a", "zz"], "documents": ["x", "y"]}).json()
    scores = [item["score"] for item in body["data"]]
    assert scores == pytest.approx([mean_probability(" a"), mean_probability(" zz")])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "queries"),
        ({"queries": "a"}, "queries"),
        ({"queries": "a", "documents": "b", "text_1": "a", "text_2": "b"}, "queries"),
        ({"queries": ["a", "b"], "documents": ["c"]}, "queries"),
        ({"queries": "", "documents": "b"}, "queries"),
        ({"text_1": " ", "text_2": "b"}, "text_1"),
        ({"queries": "a", "documents": []}, "documents"),
        ({"queries": "a", "documents": 1}, "documents"),
        ({"queries": "a", "documents": "x" * 999}, "documents"),
        ({"queries": "a", "documents": ["x"] * 2049}, "documents"),
        ({"queries": "x" * 99, "documents": "d", "truncate_prompt_tokens": 20}, "queries"),
    ],
)
def test_bad_pairs_are_refused_by_name(client: Client, body: dict[str, Any], field: str) -> None:
    assert refused(client.post("/score", json=body), 400, field, field)["param"] == field
    assert client.engine.calls == []


def test_a_long_document_is_cut_at_its_end_if_asked(client: Client) -> None:
    body = {"queries": "why", "documents": "d" * 999, "truncate_prompt_tokens": 40}
    assert client.post("/score", json=body).status_code == 200
    prompt = bytes(client.engine.calls[0].prompt).decode()
    assert len(prompt) == 40
    assert prompt == "Passage: " + "d" * 17 + "\nQuestion: why"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_gives_the_best_first(client: Client, path: str) -> None:
    # The fake likes small bytes; only the query counts, so the scores tie and the order stays.
    documents = ["one", {"text": "two"}, "three"]
    body = client.post(path, json={"query": "q", "documents": documents, "model": "fake"}).json()
    assert set(body) == {"id", "model", "results", "usage"}
    assert [r["index"] for r in body["results"]] == [0, 1, 2]
    assert [r["document"] for r in body["results"]] == [
        {"text": "one"}, {"text": "two"}, {"text": "three"},
    ]  # fmt: skip
    assert all(r["relevance_score"] == pytest.approx(mean_probability(" q"))
               for r in body["results"])  # fmt: skip
    short = client.post(
        path, json={"query": "q", "documents": documents, "top_n": 2, "return_documents": False}
    ).json()
    assert [set(r) for r in short["results"]] == [{"index", "relevance_score"}] * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("query", None), ("query", ["a"]), ("documents", []), ("documents", "x"), ("documents", [1]),
     ("documents", [{"title": "x"}]), ("top_n", -1), ("return_documents", "no")],
)  # fmt: skip
def test_bad_rerank_fields_are_refused_by_name(client: Client, field: str, value: Any) -> None:
    body = {"query": "q", "documents": ["a"]} | {field: value}
    error = refused(client.post("/rerank", json=body), 400, None, field)
    assert error["param"].startswith(field)
