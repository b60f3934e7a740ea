"""How well a document answers a query, by the model's own probabilities.

The score is that of the query given the document: a language model that has read the document finds
a query that is about it more likely (query likelihood; Sachan et al., "Improving Passage Retrieval
with Zero-Shot Question Generation", EMNLP 2022). The other way round, a document's likelihood
depends more on how ordinary its words are than on the query.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from vllm_lite.sampling_params import SamplingParams


class _Tokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def pair_up(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """(query, document) of each score: one query for all documents, or one for each.

    ``ValueError`` for other numbers of them.
    """
    asked, given = _texts("queries", queries), _texts("documents", documents)
    if not asked or not given:
        raise ValueError("there must be at least one query and one document")
    if len(asked) == 1:
        asked *= len(given)
    if len(asked) != len(given):
        raise ValueError(
            f"{len(asked)} queries for {len(given)} documents: give one query, or one per document"
        )
    return list(zip(asked, given, strict=True))


def _texts(name: str, value: str | Sequence[str]) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, bytes) or not isinstance(texts, Sequence):
        raise ValueError(f"{name} must be a text or a list of texts, got {type(value).__name__}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name}[{index}] must be a text, got {text!r:.80}")
    return list(texts)


def score_prompt(
    tokenizer: _Tokenizer, query: str, document: str, limit: int | None = None
) -> tuple[list[int], int]:
    """(token ids, index of the query's first). ``ValueError`` for a query without tokens, or one
    that leaves no room for a document.

    The parts are tokenised by themselves, so that the query's tokens are the same after every
    document. limit: tokens in all; the document's end is cut off.
    """
    context = tokenizer.encode(f"Passage: {document}")
    joint = tokenizer.encode("\nQuestion:", add_special_tokens=False)
    asked = tokenizer.encode(f" {query}", add_special_tokens=False)
    if not query.strip() or not asked:
        raise ValueError("the query is empty")
    if limit is not None:
        room = limit - len(joint) - len(asked)
        if room < 1:
            raise ValueError(f"{limit} tokens leave no room for a document beside the query")
        context = context[:room]
    context += joint
    return context + asked, len(context)


def score_params(start: int) -> SamplingParams:
    """For the log-probabilities of the prompt's tokens from ``start`` on, and nothing else."""
    return SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)


def score_of(logprobs: Iterable[float]) -> float:
    """The geometric mean of the tokens' probabilities: above 0, at most 1."""
    values = list(logprobs)
    return math.exp(math.fsum(values) / len(values))
