"""The front end's side of a request: from prompt and parameters to a message, from messages to
outputs.
"""

import hashlib
import math
import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from vllm_lite.messages import (
    MAX_CONSTRAINT_BYTES,
    AddRequest,
    SequenceOutput,
    TokenConstraint,
    TokenLogprobs,
    encode,
)
from vllm_lite.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    Position,
    PromptLogprobs,
    RequestOutput,
    decode_position,
)
from vllm_lite.pooling_params import PoolingParams
from vllm_lite.sampling_params import (
    MAX_LOGPROBS,
    RequestOutputKind,
    SamplingParams,
    check_unicode,
)
from vllm_lite.tokenizer import Tokenizer

# Text, token ids, or vLLM's dictionaries {"prompt": text} and {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, object]

CLIENT_SHIFT = 48  # a key's client is above, its counter below (csrc/core/types.h)


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int], str]:
    """(text if there is one, token ids, cache salt) of any form of prompt. ``ValueError`` for
    anything else.
    """
    salt = ""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            raise ValueError(f"prompt has unsupported keys: {', '.join(sorted(map(str, unknown)))}")
        salt_value = prompt.get("cache_salt") or ""
        if not isinstance(salt_value, str):
            raise ValueError("cache_salt must be a string")
        salt = check_unicode("cache_salt", salt_value)
        ids = prompt.get("prompt_token_ids")
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise ValueError("prompt must be a string")
        if ids is not None:
            if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
                raise ValueError("prompt_token_ids must be a list of integers")
            return text, list(ids), salt
        if text is None:
            raise ValueError("a prompt dictionary needs 'prompt' (text) or 'prompt_token_ids'")
        prompt = text
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt), salt
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise ValueError(
            f"a prompt is text, token ids or a dictionary, got {type(prompt).__name__}"
        )
    return None, list(cast("Sequence[int]", prompt)), salt


def check_prompt_ids(
    ids: Sequence[int], max_tokens: int | None, vocab_size: int, max_model_len: int
) -> None:
    """``ValueError`` naming the value and the limit unless these ids can be run."""
    if not ids:
        raise ValueError("prompt is empty: it must have at least one token")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"prompt has {len(ids)} tokens, and max_tokens {max_tokens} of output are asked for: "
            f"max_model_len is {max_model_len}, of which at least one token is the output's; "
            f"shorten the prompt to {max_model_len - 1} tokens or raise max_model_len"
        )
    # In C first: this may run in an event loop, and a prompt have hundreds of thousands of tokens.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt token {position} is {token!r}: token ids must be integers from 0 to "
                f"{vocab_size - 1}"
            )


def check_beam_width(width: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """``ValueError`` unless so many sequences may run at once."""
    name, limit = min(
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        key=lambda item: item[1],
    )
    if width > limit:
        raise ValueError(
            f"n (beam_width) is {width}, and the beams of a search run together: {name} is {limit};"
            f" ask for fewer beams or raise {name}"
        )


def make_add_request(
    key: int,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    priority: int,
    salt: str,
    eos_token_ids: Sequence[int],
    max_model_len: int,
    tokenizer: Tokenizer,
) -> AddRequest:
    """The message that starts a request. A request without a seed gets one from the system's
    randomness.

    eos_token_ids: each of them ends an output; the first without a stop reason.
    """
    ignores_eos = params.ignore_eos and params.structured_outputs is None
    eos = [] if ignores_eos else list(eos_token_ids)
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    seed = secrets.randbits(64) if params.seed is None else params.seed & (1 << 64) - 1
    room = max_model_len - len(prompt_ids)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    bias = params.logit_bias or {}
    # Without double entries, so that the size of a step's plan has a bound.
    stop_ids = list(dict.fromkeys([*eos, *(params.stop_token_ids or [])]))
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    if params.use_beam_search:
        # Of the likeliest tokens after a beam so many may be stops, and so many go on.
        num_logprobs = min(params.n + len(stop_ids), MAX_LOGPROBS)
    elif params.gives_one_output:
        num_logprobs = max(num_logprobs, 0)
    return AddRequest(
        key=key,
        prompt=array("i", prompt_ids).tobytes(),
        n=1 if params.use_beam_search else params.num_samples,
        priority=priority,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        # One typed part; adapters and media add theirs.
        salt=hashlib.blake2b(b"salt:" + salt.encode(), digest_size=16).digest() if salt else b"",
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=params.top_k,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        num_logprobs=num_logprobs,
        seed=seed,
        bias_ids=[int(token) for token in bias],
        bias_values=[float(value) for value in bias.values()],
        allowed_ids=list(dict.fromkeys(params.allowed_token_ids or [])),
        stop_ids=stop_ids,
        eos_ids=eos[:1],
        stops=stops,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        constraint=_constraint(params, stop_ids, eos, tokenizer),
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        prompt_logprobs_start=params.prompt_logprobs_start,
        beam_width=params.n if params.use_beam_search else 0,
        length_penalty=params.length_penalty,
        early_stopping={False: "no", True: "yes", "never": "never"}[params.early_stopping],
    )


def _constraint(
    params: SamplingParams, stop_ids: list[int], eos: list[int], tokenizer: Tokenizer
) -> bytes:
    structured = params.structured_outputs
    if structured is None and not params.bad_words:
        return b""
    encoded = encode(
        TokenConstraint(
            grammar="" if structured is None else structured.compiled,
            bad_words=_bad_word_ids(params.bad_words or [], tokenizer),
            late_ids=stop_ids if params.min_tokens else [],
            min_tokens=params.min_tokens,
            ignored_ids=eos if params.ignore_eos else [],
        )
    )
    if len(encoded) > MAX_CONSTRAINT_BYTES:
        raise ValueError(
            f"bad_words, stop_token_ids and structured_outputs take {len(encoded)} bytes together; "
            f"at most {MAX_CONSTRAINT_BYTES} are accepted"
        )
    return encoded


def _bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Each word at a text's beginning and after a space."""
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [list(ids) for ids in dict.fromkeys(map(tuple, encoded)) if ids]


@dataclass(slots=True)
class _Sample:
    """Everything one of the n samples has given so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Position] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestState:
    """Collects what a request's sequences give and turns it into ``RequestOutput``s of the kind
    asked for.
    """

    def __init__(
        self,
        request_id: str,
        key: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self.request_id = request_id
        self.key = key
        self.params = params
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._tokenizer = tokenizer
        self._samples = [_Sample() for _ in range(params.num_samples)]
        self.num_samples = self._num_unfinished = params.num_samples
        self._kind = RequestOutputKind.FINAL_ONLY if params.gives_one_output else params.output_kind
        self._num_cached_tokens = 0
        self._prompt_logprobs: PromptLogprobs | None = None
        self._awaits_prompt = params.prompt_logprobs is not None
        self._held: RequestOutput | None = None  # a delta

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def update(self, output: SequenceOutput) -> RequestOutput | None:
        """Takes in one sequence's news. None if the output kind asks for silence until the end."""
        sample = self._samples[output.sample_index]
        if output.sample_index == 0:
            self._num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(
                self._prompt_token_ids, output.prompt_logprobs, self._text
            )
        logprobs = None
        if output.logprobs is not None:
            if self.params.logprobs is not None:
                logprobs = self._decode_logprobs(output.token_ids, output.logprobs)
            for entry in output.logprobs:
                sample.cumulative_logprob += entry.logprob
        if output.finish_reason is not None:
            sample.finish_reason = output.finish_reason
            sample.stop_reason = output.stop_reason
            self._num_unfinished -= 1
        if self._kind is RequestOutputKind.DELTA:
            made = self._delta(output, logprobs, sample.cumulative_logprob)
            return self._behind_the_prompt(made) if self._awaits_prompt else made
        sample.text += output.text
        sample.token_ids += output.token_ids
        sample.logprobs += logprobs or []
        if self._kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        return self._output(self._best())

    def _behind_the_prompt(self, made: RequestOutput) -> RequestOutput | None:
        """Nothing comes before the prompt's log-probabilities, which sample 0 brings: what another
        has given by then comes with them.
        """
        made.prompt_logprobs = self._prompt_logprobs
        if self._held is not None:
            self._held.append(made)
            made = self._held
        self._awaits_prompt = made.prompt_logprobs is None
        self._held = made if self._awaits_prompt else None
        return None if self._awaits_prompt else made

    def end(self, finish_reason: str, error: str | None = None) -> RequestOutput:
        """The last output: every sample that is unfinished ends with this reason."""
        ended = []
        for index, sample in enumerate(self._samples):
            if sample.finish_reason is None:
                sample.finish_reason = finish_reason
                ended.append((index, sample))
        self._num_unfinished = 0
        if self._kind is not RequestOutputKind.DELTA:
            ended = self._best()
        output = self._output(ended)
        output.error = error
        if self._held is not None:
            self._held.append(output)
            output = self._held
        return output

    def _delta(
        self,
        output: SequenceOutput,
        logprobs: list[Position] | None,
        cumulative_logprob: float,
    ) -> RequestOutput:
        """The news as it came; this is done for every token of every stream."""
        wants_logprobs = self.params.logprobs is not None
        news = CompletionOutput(
            output.sample_index,
            output.text,
            output.token_ids,
            cumulative_logprob if wants_logprobs else None,
            (logprobs or []) if wants_logprobs else None,
            output.finish_reason,
            output.stop_reason,
        )
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            [news],
            self._num_unfinished == 0,
            self._num_cached_tokens,
        )

    def _best(self) -> list[tuple[int, _Sample]]:
        """The n samples that are given, with their indices."""
        samples = self._samples
        if len(samples) > self.params.n:
            samples = sorted(samples, key=lambda sample: -sample.cumulative_logprob)
        return list(enumerate(samples[: self.params.n]))

    def _output(self, samples: list[tuple[int, _Sample]]) -> RequestOutput:
        wants_logprobs = self.params.logprobs is not None
        wants_sum = wants_logprobs or self.params.gives_one_output
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=index,
                    text=sample.text,
                    # A caller may keep an output: it must not grow behind its back.
                    token_ids=list(sample.token_ids),
                    cumulative_logprob=sample.cumulative_logprob if wants_sum else None,
                    logprobs=list(sample.logprobs) if wants_logprobs else None,
                    finish_reason=sample.finish_reason,
                    stop_reason=sample.stop_reason,
                )
                for index, sample in samples
            ],
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _decode_logprobs(
        self, token_ids: list[int], logprobs: list[TokenLogprobs]
    ) -> list[Position]:
        return [
            decode_position(token, entry, self._text)
            for token, entry in zip(token_ids, logprobs, strict=True)
        ]

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")


class PoolingState:
    """As ``RequestState``, of a request for a vector: one output, at the end."""

    def __init__(
        self, request_id: str, key: int, prompt_token_ids: list[int], params: PoolingParams
    ) -> None:
        self.request_id = request_id
        self.key = key
        self.num_samples = 1
        self.finished = False
        self._prompt_token_ids = prompt_token_ids
        self._params = params

    def update(self, output: SequenceOutput) -> PoolingRequestOutput:
        self.finished = True
        assert output.vector is not None
        vector = array("f", output.vector)
        if self._params.dimensions is not None:
            vector = vector[: self._params.dimensions]
        if self._params.normalize and (length := math.hypot(*vector)) > 0:
            vector = array("f", [value / length for value in vector])
        return self._output(vector.tolist(), output.num_cached_tokens)

    def end(self, finish_reason: str, error: str | None = None) -> PoolingRequestOutput:
        """The output of a request that was aborted or failed."""
        self.finished = True
        made = self._output([], 0)
        made.error = error or finish_reason
        return made

    def _output(self, vector: list[float], num_cached_tokens: int) -> PoolingRequestOutput:
        return PoolingRequestOutput(
            self.request_id,
            PoolingOutput(vector),
            self._prompt_token_ids,
            num_cached_tokens=num_cached_tokens,
        )
