"""An engine that plays a script, and a tokenizer whose tokens are bytes."""

import asyncio
import codecs
import math
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_lite.messages import TokenLogprobs
from vllm_lite.outputs import (
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    PromptLogprobs,
    RequestOutput,
)
from vllm_lite.pooling_params import PoolingParams
from vllm_lite.sampling_params import RequestOutputKind, SamplingParams
from vllm_lite.stats import EngineStats

BOS, EOS = 256, 257
SPECIAL = {BOS: b"<s>", EOS: b"</s>"}
VOCAB_SIZE = 300  # the logits' width: wider than the tokenizer, as in padded checkpoints
MAX_MODEL_LEN = 256
MASKED = 7  # a prompt's token that the model holds to be impossible


class FakeTokenizer:
    """Token id = byte; 256 and 257 are special."""

    vocab_size = 258

    def __init__(self) -> None:
        self.chat_template: str | dict[str, str] | None = None
        self.opening = "assistant:"  # of the assistant's turn
        self.chats: list[dict[str, Any]] = []
        self.may_end = threading.Event()  # encode() keeps the interpreter busy until it is set
        self.may_end.set()
        self.is_encoding = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.is_encoding = True
        while not self.may_end.is_set():
            pass
        self.is_encoding = False
        return list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        self.chats.append(
            {
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "add_special_tokens": add_special_tokens,
                "chat_template": chat_template,
                "template_kwargs": dict(template_kwargs or {}),
            }
        )
        if any(message["role"] == "martian" for message in messages):
            raise ValueError("the template knows no role 'martian'")
        text = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return [BOS, *text.encode(), *(self.opening.encode() if add_generation_prompt else b"")]

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL.get(token_id) or (bytes([token_id]) if token_id < 256 else b"")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in SPECIAL)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


@dataclass
class Config:
    model: str = "/models/fake"
    max_model_len: int = MAX_MODEL_LEN
    max_num_waiting: int = 4096
    served_model_names: list[str] = field(default_factory=lambda: ["fake", "alias"])


@dataclass
class ModelConfig:
    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 8
    generation_defaults: dict[str, Any] = field(default_factory=dict)


@dataclass
class Script:
    """``text`` repeats until ``max_tokens``, or ends by EOS/stop with ``ends``."""

    text: str | bytes = "Hello, world"
    tokens: list[int] | None = None  # in place of the text
    ends: bool = True
    stop_reason: int | str | None = None
    delay: float = 0.0  # seconds before each token
    held_at: int | None = None  # token index that does not come before this is None again
    per_output: int = 1  # tokens in one delta
    cached: int = 0
    start_error: Exception | None = None
    error_at: int | None = None  # token index where ``error`` comes
    error: Exception | None = None
    last_reason: str | None = None  # in place of stop/length
    top: dict[int, float] | None = None  # alternatives at each position
    logprob: float = -0.25


@dataclass
class Call:
    prompt: list[int]
    params: SamplingParams | PoolingParams
    request_id: str
    priority: int
    cache_salt: str | None = None


class FakeEngine:
    def __init__(self, script: Script | None = None) -> None:
        self.tokenizer = FakeTokenizer()
        self.model_config = ModelConfig()
        self.config = Config()
        self.script = script or Script()
        self.calls: list[Call] = []
        self.running = self.most_running = 0
        self.let_go_at: int | None = None  # so many run when what the script holds goes on
        self.produced = 0  # outputs of all requests
        self.aborted: list[str] = []
        self.reason: str | None = None
        self.drained = False
        self.now = EngineStats(kv_total_blocks=100)
        self.stats_error: Exception | None = None

    async def generate(
        self,
        prompt: list[int] | Mapping[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        script, params = self.script, sampling_params
        salt = None
        if isinstance(prompt, Mapping):
            prompt, salt = prompt["prompt_token_ids"], prompt["cache_salt"]
        self.calls.append(Call(prompt, params, request_id, priority, salt))
        if script.start_error is not None:
            raise script.start_error
        if any(call.request_id == request_id for call in self.calls[:-1]):
            raise ValueError(f"request id {request_id} is in use")
        self._begin()
        try:
            async for output in self._outputs(prompt, params, request_id):
                yield output
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request_id)
            raise
        finally:
            self.running -= 1

    async def _outputs(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        script = self.script
        samples = [_Sample(script, params, index) for index in range(params.n)]
        of_prompt = _prompt_logprobs(self.tokenizer, prompt, params)
        delta = params.output_kind is RequestOutputKind.DELTA
        produced = 0
        while any(not sample.done for sample in samples):
            await asyncio.sleep(script.delay)
            while script.held_at is not None and produced >= script.held_at:
                await asyncio.sleep(0.01)
            if script.error_at is not None and produced >= script.error_at:
                assert script.error is not None
                raise script.error
            produced += 1
            self.produced += 1
            outputs = [sample.step() for sample in samples if not sample.done]
            if params.output_kind is RequestOutputKind.FINAL_ONLY:
                outputs = [
                    sample.everything
                    for sample in samples
                    if sample.everything.finish_reason and not sample.told
                ]
                for sample in samples:
                    sample.told = bool(sample.everything.finish_reason)
            if outputs:
                finished = all(sample.done for sample in samples)
                yield RequestOutput(
                    request_id, None, prompt, outputs, finished, script.cached, of_prompt
                )
                if delta:
                    of_prompt = None  # told once

    async def encode(
        self,
        prompt: list[int],
        pooling_params: PoolingParams,
        request_id: str,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        self.calls.append(Call(prompt, pooling_params, request_id, priority))
        if self.script.start_error is not None:
            raise self.script.start_error
        self._begin()
        try:
            await asyncio.sleep(self.script.delay)
            while self.script.held_at is not None:
                await asyncio.sleep(0.01)
            vector = fake_vector(prompt)[: pooling_params.dimensions]
            yield PoolingRequestOutput(request_id, PoolingOutput(vector), prompt)
        finally:
            self.running -= 1

    def _begin(self) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.let_go_at is not None and self.running >= self.let_go_at:
            self.script.held_at = None

    def health(self) -> str | None:
        return self.reason

    def stats(self) -> EngineStats:
        if self.stats_error is not None:
            raise self.stats_error
        return self.now

    async def drain(self) -> None:
        while self.running:
            await asyncio.sleep(0.01)
        self.drained = True


def prompt_logprob(token: int) -> float:
    """What the fake says of a prompt's token."""
    return -math.inf if token == MASKED else -token / 64


def fake_vector(prompt: list[int]) -> list[float]:
    return [(sum(prompt) + i) / 256 for i in range(8)]


def _prompt_logprobs(
    tokenizer: FakeTokenizer, prompt: list[int], params: SamplingParams
) -> PromptLogprobs | None:
    count = params.prompt_logprobs
    if count is None:
        return None
    top = [5 + k for k in range(count)]  # the likeliest, whatever the token
    entries = [
        TokenLogprobs(prompt_logprob(token), 30, top, [-0.5 - k for k in range(count)])
        for token in prompt[max(params.prompt_logprobs_start, 1) :]
    ]
    return PromptLogprobs(
        prompt, entries, lambda i: tokenizer.token_bytes(i).decode(errors="replace")
    )


class _Sample:
    def __init__(self, script: Script, params: SamplingParams, index: int) -> None:
        text = script.text.encode() if isinstance(script.text, str) else script.text
        tokens = list(text) if script.tokens is None else script.tokens
        limit = 16 if params.max_tokens is None else params.max_tokens
        natural = script.ends and not params.ignore_eos and len(tokens) <= limit
        self._reason = script.last_reason or ("stop" if natural else "length")
        self._tokens = tokens if natural else [tokens[i % len(tokens)] for i in range(limit)]
        self._script, self._params = script, params
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0
        self.everything = CompletionOutput(index, "", [], logprobs=None)
        if params.logprobs is not None:
            self.everything.logprobs = []
        self.done = False
        self.told = False

    def step(self) -> CompletionOutput:
        ids = self._tokens[self._at : self._at + self._script.per_output]
        self._at += len(ids)
        self.done = self._at >= len(self._tokens)
        skip = self._params.skip_special_tokens
        data = b"".join(
            b"" if skip and i in SPECIAL else SPECIAL.get(i) or (bytes([i]) if i < 256 else b"")
            for i in ids
        )
        delta = CompletionOutput(self.everything.index, self._decoder.decode(data, self.done), ids)
        if self.everything.logprobs is not None:
            delta.logprobs = [self._position(i) for i in ids]
            self.everything.logprobs += delta.logprobs
        if self.done:
            delta.finish_reason = self._reason
            delta.stop_reason = self._script.stop_reason
            self.everything.finish_reason = delta.finish_reason
            self.everything.stop_reason = delta.stop_reason
        self.everything.text += delta.text
        self.everything.token_ids += ids
        return delta

    def _position(self, chosen: int) -> dict[int, Logprob]:
        """As the engine: the top alternatives, and the chosen token when it is not among them."""
        everything = {chosen: self._script.logprob} | (
            self._script.top or {(chosen + k) % 128: -1.0 - k for k in range(1, 25)}
        )
        ranked = sorted(everything, key=lambda i: (-_order(everything[i]), i))
        kept = ranked[: self._params.logprobs or 0]
        if chosen not in kept:
            kept.append(chosen)
        return {i: Logprob(everything[i], ranked.index(i) + 1) for i in reversed(kept)}


def _order(value: float) -> float:
    return -math.inf if math.isnan(value) else value
