"""Bodies of ``/v1/embeddings`` (OpenAI's), ``/score`` (vLLM's), ``/rerank`` (Jina's, Cohere's)."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from vllm_lite.pooling_params import PoolingType
from vllm_lite.server.protocol import Int32, NonNegative, Positive

MAX_INPUTS = 2048  # OpenAI's

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class PromptRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    user: str | None = None
    priority: Int32 | None = None  # lower runs first
    # At most so many tokens: the last ones of an input to embed, the first ones of a document.
    # -1: as many as fit.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


class EmbeddingRequest(PromptRequest, kw_only=True):
    input: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    add_special_tokens: bool | None = None
    pooling_type: PoolingType | None = None  # LAST if left out
    normalize: bool | None = None  # true if left out


class PromptUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """``embedding``: numbers, or base64 of little-endian float32s."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage


class ScoreRequest(PromptRequest, kw_only=True):
    """One query for all documents, or one for each, under one of four pairs of names."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None  # documents
    text_1: Texts | None = None  # queries
    text_2: Texts | None = None  # documents
    data_1: Texts | None = None
    data_2: Texts | None = None


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class RerankDocument(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(PromptRequest, kw_only=True):
    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: NonNegative | None = None  # 0: all
    return_documents: bool | None = None  # true if left out


class RerankResult(msgspec.Struct, kw_only=True):
    index: int
    document: RerankDocument | UnsetType = UNSET
    relevance_score: float


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]  # best first
    usage: PromptUsage
