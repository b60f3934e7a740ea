"""``/v1/embeddings``, ``/score`` and ``/rerank``: what is computed of prompts alone."""

import base64
import secrets
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec

from vllm_lite.outputs import CompletionOutput, PromptLogprobs
from vllm_lite.pooling_params import PoolingParams
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.scoring import pair_up, score_of, score_params, score_prompt
from vllm_lite.server.body import decode
from vllm_lite.server.completions import split_prompts
from vllm_lite.server.errors import bad_request
from vllm_lite.server.generation import Job, PromptResult, Renderer
from vllm_lite.server.pooling_protocol import (
    MAX_INPUTS,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    PromptRequest,
    PromptUsage,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from vllm_lite.server.protocol import Usage
from vllm_lite.server.sampling import check_token_ids, served_name
from vllm_lite.server.state import ServerState

_PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"),
          ("data_1", "data_2"))  # fmt: skip

_embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)
_score_decoder = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)


def prepare_embeddings(state: ServerState, body: bytes) -> tuple[Job, "EmbeddingRenderer"]:
    """Parses, checks and tokenises a body; runs in a thread. Raises ``ApiError``."""
    request = decode(_embedding_decoder, body)
    engine = state.engine
    model = served_name(engine, request.model)
    try:
        params = PoolingParams(
            pooling_type=request.pooling_type or "LAST",
            normalize=request.normalize is not False,
            dimensions=request.dimensions,
        )
        params.validate_for(engine.model_config.hidden_size)
    except ValueError as error:
        raise bad_request(str(error), str(error).split()[0]) from error
    inputs = split_prompts(request.input, "input")
    if len(inputs) > MAX_INPUTS:
        raise bad_request(f"input: {len(inputs)} inputs; at most {MAX_INPUTS} are taken", "input")
    special = request.add_special_tokens is not False
    limit = _token_limit(state, request)
    prompts = []
    for given in inputs:
        if isinstance(given, str):
            try:
                ids = engine.tokenizer.encode(given, add_special_tokens=special)
            except ValueError as error:  # too long to be worth tokenising
                raise bad_request(f"input: {error}", "input") from error
        else:
            ids = given
        prompts.append(_fitting(state, ids[-limit:] if limit else ids, "input"))
    job = _job("embd", model, prompts, [params] * len(prompts), request)
    return job, EmbeddingRenderer(job, request.encoding_format == "base64")


def prepare_score(state: ServerState, body: bytes) -> tuple[Job, "ScoreRenderer"]:
    """As ``prepare_embeddings``."""
    request = decode(_score_decoder, body)
    model = served_name(state.engine, request.model)
    given = [pair for pair in _PAIRS if all(getattr(request, name) is not None for name in pair)]
    if len(given) != 1:
        names = ", ".join(" and ".join(pair) for pair in _PAIRS)
        raise bad_request(f"exactly one of these pairs must be given: {names}", _PAIRS[0][0])
    queries, documents = (getattr(request, name) for name in given[0])
    job = _score_job(state, request, "score", model, queries, documents, given[0])
    return job, ScoreRenderer(job)


def prepare_rerank(state: ServerState, body: bytes) -> tuple[Job, "RerankRenderer"]:
    """As ``prepare_embeddings``."""
    request = decode(_rerank_decoder, body)
    model = served_name(state.engine, request.model)
    texts = [item if isinstance(item, str) else item.text for item in request.documents]
    names = ("query", "documents")
    job = _score_job(state, request, "rerank", model, request.query, texts, names)
    shown = texts if request.return_documents is not False else None
    return job, RerankRenderer(job, request.top_n or len(texts), shown)


def _token_limit(state: ServerState, request: PromptRequest) -> int | None:
    """The most tokens that a prompt is cut to; None: it is not cut."""
    asked, longest = request.truncate_prompt_tokens, state.engine.config.max_model_len - 1
    if asked is None:
        return None
    if asked == 0 or asked > longest:
        raise bad_request(
            f"truncate_prompt_tokens: {asked} must be from 1 to {longest} (max_model_len less one),"
            " or -1 for that",
            "truncate_prompt_tokens",
        )
    return longest if asked == -1 else asked


def _fitting(state: ServerState, ids: list[int], param: str) -> list[int]:
    """The ids, if the engine can run them."""
    longest = state.engine.config.max_model_len - 1
    if not ids:
        raise bad_request(f"{param}: empty; it must have at least one token", param)
    if len(ids) > longest:
        raise bad_request(
            f"{param}: {len(ids)} tokens; the model's context (max_model_len) takes {longest} here;"
            " shorten it or set truncate_prompt_tokens",
            param,
            "context_length_exceeded",
        )
    check_token_ids(ids, state.engine.model_config.vocab_size, param)
    return ids


def _score_job(
    state: ServerState,
    request: PromptRequest,
    kind: str,
    model: str,
    queries: str | list[str],
    documents: str | list[str],
    names: tuple[str, str],
) -> Job:
    """names: of the request's fields for queries and documents."""
    limit = _token_limit(state, request)
    prompts, params = [], []
    try:
        for query, document in pair_up(queries, documents):
            ids, start = score_prompt(state.engine.tokenizer, query, document, limit)
            prompts.append(_fitting(state, ids, names[1]))
            params.append(score_params(start))
    except ValueError as error:
        raise bad_request(f"{names[0]}: {error}", names[0]) from error
    return _job(kind, model, prompts, params, request)


def _job(
    kind: str,
    model: str,
    prompts: list[list[int]],
    params: Sequence[SamplingParams | PoolingParams],
    request: PromptRequest,
) -> Job:
    return Job(
        id=f"{kind}-{secrets.token_hex(16)}",
        model=model,
        created=int(time.time()),
        prompts=prompts,
        params=list(params),
        priority=request.priority or 0,
        stream=False,
    )


class _PromptRenderer(Renderer):
    """Keeps what comes of the prompts; nothing is streamed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._results: dict[int, PromptResult] = {}

    def prompt(self, index: int, result: PromptResult) -> None:
        self._results[index] = result

    def chunks(
        self, choice: int, output: CompletionOutput, usage: Callable[[], Usage]
    ) -> Iterator[msgspec.Struct]:
        raise AssertionError("not streamed")

    def ending(self, usage: Usage) -> Iterator[msgspec.Struct]:
        raise AssertionError("not streamed")

    def _scores(self) -> list[float]:
        results = [self._results[index] for index in range(len(self._job.prompts))]
        return [score_of(r.values()) for r in results if isinstance(r, PromptLogprobs)]


def _usage(usage: Usage) -> PromptUsage:
    return PromptUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens)


class EmbeddingRenderer(_PromptRenderer):
    def __init__(self, job: Job, as_base64: bool) -> None:
        super().__init__(job)
        self._as_base64 = as_base64

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> EmbeddingResponse:
        data = [
            Embedding(index=index, embedding=self._shown(self._results[index]))
            for index in range(len(outputs))
        ]
        return EmbeddingResponse(data=data, model=self._job.model, usage=_usage(usage))

    def _shown(self, vector: PromptResult) -> list[float] | str:
        assert isinstance(vector, list)
        if not self._as_base64:
            return vector
        numbers = array("f", vector)
        if sys.byteorder == "big":
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode()


class ScoreRenderer(_PromptRenderer):
    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> ScoreResponse:
        job = self._job
        data = [Score(index=index, score=score) for index, score in enumerate(self._scores())]
        return ScoreResponse(
            id=job.id, created=job.created, model=job.model, data=data, usage=_usage(usage)
        )


class RerankRenderer(_PromptRenderer):
    def __init__(self, job: Job, top_n: int, documents: list[str] | None) -> None:
        super().__init__(job)
        self._top_n = top_n
        self._documents = documents

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> RerankResponse:
        ranked = sorted(enumerate(self._scores()), key=lambda item: -item[1])
        results = [
            RerankResult(
                index=index,
                document=RerankDocument(text=self._documents[index])
                if self._documents is not None
                else msgspec.UNSET,
                relevance_score=score,
            )
            for index, score in ranked[: self._top_n]
        ]
        return RerankResponse(
            id=self._job.id, model=self._job.model, results=results, usage=_usage(usage)
        )
