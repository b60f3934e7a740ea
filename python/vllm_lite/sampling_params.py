"""How a request's tokens are chosen and when it ends."""

from enum import Enum

import msgspec


class RequestOutputKind(Enum):
    CUMULATIVE = 0  # every output holds everything so far
    DELTA = 1  # every output holds what is new
    FINAL_ONLY = 2  # one output, at the end


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's names and defaults. Validated when it is made; ``ValueError`` names the field, value and limit."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
