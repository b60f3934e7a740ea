"""From a request's fields to ``SamplingParams``.

Here are the checks that need the model or the engine's limits; ``protocol`` has types and ranges.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from vllm_lite.pooling_params import PoolingParams
from vllm_lite.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm_lite.server.engine import EngineLike
from vllm_lite.server.errors import ApiError, bad_request, field_of, show
from vllm_lite.server.protocol import (
    NEUTRAL,
    GenerationRequest,
    SamplingFields,
    StructuredOutputs,
    unsupported_fields,
)
from vllm_lite.server.state import ServerState

# Fields of one name and meaning on both sides; null takes the model's default, then the class's.
_SAME = (
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "bad_words",
)
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# Log-probabilities of prompts in one answer: each takes some 65 bytes of it.
MAX_PROMPT_LOGPROBS = 1 << 20


def shared_fields(request: SamplingFields) -> dict[str, Any]:
    """What requests of all endpoints that generate have in common."""
    return {name: getattr(request, name) for name in SamplingFields.__struct_fields__}


def refuse_fields(request: SamplingFields) -> None:
    """Refuses what the request's type declares as not supported."""
    for name in unsupported_fields(type(request)):
        value = getattr(request, name)
        if value is None or any(
            type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(name, ())
        ):
            continue
        raise bad_request(
            f"{name}: {show(value)} is not supported by this server; leave the field out",
            name,
            "unsupported_parameter",
        )


def refuse_unsupported(request: GenerationRequest) -> None:
    refuse_fields(request)
    for name in unsupported_fields(StructuredOutputs):
        if getattr(request.structured_outputs, name, None) not in (None, False):
            raise bad_request(
                f"structured_outputs.{name}: not supported by this server; leave the field out",
                "structured_outputs",
                "unsupported_parameter",
            )
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request(
            "prompt_logprobs: not available with stream true; completions stream them with echo and"
            " logprobs",
            "prompt_logprobs",
        )
    if request.stream_options is not None:
        if not request.stream:
            raise bad_request("stream_options: allowed only with stream true", "stream_options")
        options = request.stream_options
        if options.continuous_usage_stats and not options.include_usage:
            raise bad_request(
                "stream_options.continuous_usage_stats: needs stream_options.include_usage true",
                "stream_options",
            )


def served_name(engine: EngineLike, asked: str | None) -> str:
    """The model name for the answer; 404 for a model that is not served."""
    names = engine.config.served_model_names
    if asked is None:
        return names[0]
    if asked not in names:
        raise ApiError(
            404,
            f"model: {show(asked)} is not served here; served: {', '.join(names)}",
            param="model",
            code="model_not_found",
        )
    return asked


def check_choices(
    state: ServerState, request: GenerationRequest, prompts: int, prompt_param: str
) -> None:
    """All choices wait at once, so that more than the queue holds could never be served."""
    n_name = "n" if request.best_of is None else "best_of"
    n = getattr(request, n_name) or 1
    param = prompt_param if n == 1 else n_name
    limits = {
        "max_choices": state.options.max_choices,
        "max_num_waiting": state.engine.config.max_num_waiting,
    }
    name = min(limits, key=lambda name: limits[name])
    if prompts * n > limits[name]:
        raise bad_request(
            f"{param}: {prompts} prompts x {n_name}={n} are {prompts * n} choices; this server's"
            f" limit is {limits[name]} ({name})",
            param,
        )


def check_prompt_logprobs(num_tokens: int, num_top: int, param: str) -> None:
    """num_tokens: of all prompts, as often as an answer tells of them; num_top: alternatives."""
    entries = num_tokens * (1 + num_top)
    if entries > MAX_PROMPT_LOGPROBS:
        raise bad_request(
            f"{param}: {num_tokens} prompt tokens with {num_top} alternatives each are {entries}"
            f" log-probabilities; the limit is {MAX_PROMPT_LOGPROBS}",
            param,
        )


def sampling_params(
    request: GenerationRequest,
    engine: EngineLike,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    max_tokens: int,
) -> SamplingParams:
    """``max_tokens`` here is provisional: ``for_prompt`` sets each prompt's own."""
    fields: dict[str, Any] = {}
    defaults = engine.model_config.generation_defaults
    for name in _SAME:
        value = getattr(request, name)
        # Those of the model are about sampling, and a beam search samples nothing.
        if value is None and name in _MODEL_DEFAULTS and not request.use_beam_search:
            value = defaults.get(name)
        if value is not None:
            fields[name] = value
    if (structured := structured_outputs(request)) is not None:
        fields["structured_outputs"] = structured
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    try:
        params = SamplingParams(
            logprobs=logprobs, prompt_logprobs=prompt_logprobs, max_tokens=max_tokens,
            output_kind=kind, **fields,
        )  # fmt: skip
        params.check_token_ids(engine.model_config.vocab_size)
        return params
    except ValueError as error:
        raise bad_request(str(error), field_of(error)) from error


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """What the output must be; compiles its grammar. 400 if more than one field says it."""
    asked: dict[str, tuple[str, Any]] = {}  # by the field's name: kind, value
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{kind}", None)) is not None:
            asked[f"guided_{kind}"] = kind, value
    own = request.structured_outputs
    for kind in StructuredOutputsParams.__struct_fields__ if own is not None else ():
        value = getattr(own, kind)
        if value is not None and value is not False:
            asked[f"structured_outputs.{kind}"] = kind, value
    form = request.response_format
    if form is not None and form.type == "json_object":
        asked["response_format"] = "json_object", True
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise bad_request("response_format.json_schema: missing", "response_format")
        schema = form.json_schema.schema
        asked["response_format.json_schema.schema"] = "json", {} if schema is None else schema
    if own is not None and not any(name.startswith("structured_outputs") for name in asked):
        names = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise bad_request(f"structured_outputs: must have one of {names}", "structured_outputs")
    if len(asked) > 1:
        names = " and ".join(asked)
        raise bad_request(f"{names}: only one of them can be given", next(reversed(asked)))
    for name, (kind, value) in asked.items():
        if request.use_beam_search:
            raise bad_request(
                f"{name}: cannot be combined with use_beam_search", name.partition(".")[0]
            )
        try:
            return StructuredOutputsParams(**{kind: value})
        except ValueError as error:
            message = str(error).replace(f"structured_outputs.{kind}", name, 1)
            raise bad_request(message, name.partition(".")[0]) from error
    return None


def check_token_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"{param}: token id {show(token_id)} is outside 0..{vocab_size - 1}",
                param,
            )


def output_length(
    request: GenerationRequest,
    prompt_length: int,
    max_model_len: int,
    default: int | None,
    param: str,
    may_be_zero: bool,
) -> int:
    """How many tokens may be generated; ``default`` None: as many as fit. ``may_be_zero``: the
    request asks for something of its prompt.

    A length that was asked for must fit whole; a default is cut to what is left.
    """
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(request, name)
    if asked == 0 and not may_be_zero:
        raise bad_request(
            f"{name}: 0 generates nothing; it must be at least 1 without echo or prompt_logprobs",
            name,
        )
    left = max_model_len - prompt_length
    if left < 1:
        output = (
            f"{asked} output tokens were asked for"
            if asked is not None
            else "at least 1 output token is needed"
        )
        raise bad_request(
            f"{param}: the prompt has {prompt_length} tokens and {output}, but the model's context"
            f" (max_model_len) is {max_model_len} tokens; shorten the prompt",
            param,
            "context_length_exceeded",
        )
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise bad_request(
            f"{name}: {asked} output tokens after a prompt of {prompt_length} tokens exceed the"
            f" model's context (max_model_len) of {max_model_len} tokens; ask for at most {left} or"
            " shorten the prompt",
            name,
            "context_length_exceeded",
        )
    return int(asked)


def truncated(request: GenerationRequest, ids: list[int], max_model_len: int) -> list[int]:
    """The last ``truncate_prompt_tokens`` of the prompt, with ``truncation_side`` "right" the
    first; -1: as many as leave room for output.
    """
    kept = request.truncate_prompt_tokens
    if kept is None:
        return ids
    if kept == 0 or kept > max_model_len:
        raise bad_request(
            f"truncate_prompt_tokens: {kept}; it must be -1 or from 1 to {max_model_len}"
            " (max_model_len)",
            "truncate_prompt_tokens",
        )
    if kept == -1:
        kept = max_model_len - (request.max_completion_tokens or request.max_tokens or 1)
    if kept <= 0:
        return ids
    return ids[:kept] if request.truncation_side == "right" else ids[-kept:]


def for_prompts(params: SamplingParams, lengths: list[int]) -> list[SamplingParams | PoolingParams]:
    return [
        params
        if length == params.max_tokens
        else msgspec.structs.replace(params, max_tokens=length)
        for length in lengths
    ]
