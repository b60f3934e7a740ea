"""The engine as an object: requests in, outputs out. ``LLM``, ``LLMEngine`` and ``AsyncLLMEngine``
stand on it.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any, Self

from vllm_lite.chat_template import load_chat_template
from vllm_lite.clients import CoreClient, InProcessClient, ProcessClient
from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineDeadError, EngineError, ImpossibleError, QueueFullError
from vllm_lite.messages import AbortRequests, CoreStats, EngineOutputs, SequenceOutput
from vllm_lite.model_config import ModelConfig, load_model_config
from vllm_lite.model_files import ModelFiles, find_model
from vllm_lite.outputs import PoolingRequestOutput, RequestOutput
from vllm_lite.pooling_params import PoolingParams
from vllm_lite.requests import (
    CLIENT_SHIFT,
    PoolingState,
    Prompt,
    RequestState,
    check_beam_width,
    check_prompt_ids,
    make_add_request,
    tokenize_prompt,
)
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.stats import EngineStats
from vllm_lite.tokenizer import Tokenizer, load_tokenizer

Params = SamplingParams | PoolingParams
AnyOutput = RequestOutput | PoolingRequestOutput

# What the engine core is told of sampling where nothing is sampled.
_NO_SAMPLING = SamplingParams(max_tokens=0, seed=0)
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


class Engine:
    """One model, ready to generate.

    ``Engine("smollm2")`` runs the engine core and the worker in this process; ``multiprocess=True``
    gives each a process of its own, as the server does. ``options`` are ``EngineConfig``'s fields.
    Not thread-safe: one thread at a time. Close it, or use it as a context manager; nothing is left
    behind.

    Raises ``ValueError`` or ``FileNotFoundError`` naming the option for what cannot work,
    ``EngineDeadError`` if a process of the engine does not start.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        multiprocess: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = model
        config = EngineConfig(**options)
        files = find_model(config.model)
        model_config = load_model_config(files)
        resolved = config.resolve(model_config)
        tokenizer = load_tokenizer(files)
        client: CoreClient
        if multiprocess:
            client = ProcessClient.start(config, resolved, files, model_config, progress)
        else:
            client = InProcessClient(config, resolved, files, model_config, tokenizer, progress)
        self._attach(config, model_config, tokenizer, client, resolved.max_model_len)

    @classmethod
    def over(cls, client: CoreClient, config: EngineConfig, files: ModelFiles) -> Self:
        """An engine whose core is reached through ``client``."""
        engine = cls.__new__(cls)
        model_config = load_model_config(files)
        max_model_len = config.resolve(model_config).max_model_len
        engine._attach(config, model_config, load_tokenizer(files), client, max_model_len)
        return engine

    def _attach(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        client: CoreClient,
        max_model_len: int,
    ) -> None:
        config.max_model_len = max_model_len
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        tokenizer.max_tokens = max_model_len
        if config.chat_template is not None:
            tokenizer.chat_template = load_chat_template(config.chat_template)
        # The tokenizer's own first: make_add_request.
        ends = (*tokenizer.eos_token_ids, *model_config.eos_token_ids)
        self._eos_token_ids = tuple(dict.fromkeys(ends))
        self.client = client
        self.max_model_len = max_model_len
        self._requests: dict[int, RequestState | PoolingState] = {}
        self._keys: dict[str, int] = {}
        self._next_key = client.client_id << CLIENT_SHIFT
        self._core_stats = CoreStats()
        self._closed = False
        self._owner_pid = os.getpid()

    # --- requests ---------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt: Prompt, params: Params, priority: int = 0
    ) -> None:
        """Queues a request. ``ValueError`` names what is wrong with it; then nothing was queued.

        priority: lower runs first, under scheduling_policy "priority".
        """
        self.check_usable()
        if request_id in self._keys:
            raise ValueError(f"request_id {request_id!r} is already in use")
        if type(priority) is not int or not _INT32_MIN <= priority <= _INT32_MAX:
            raise ValueError(
                f"priority must be an integer from {_INT32_MIN} to {_INT32_MAX}, got {priority!r}"
            )
        text, ids, salt = self.check_request(prompt, params)
        key = self._next_key
        self._next_key += 1
        sampling = params if isinstance(params, SamplingParams) else _NO_SAMPLING
        message = make_add_request(
            key, ids, sampling, priority, salt, self._eos_token_ids, self.max_model_len,
            self.tokenizer,
        )  # fmt: skip
        state: RequestState | PoolingState
        if isinstance(params, PoolingParams):
            message.pooling = params.pooling_type
            state = PoolingState(request_id, key, ids, params)
        else:
            state = RequestState(request_id, key, text, ids, params, self.tokenizer)
        self.client.send(message)
        self._requests[key] = state
        self._keys[request_id] = key

    def check_request(self, prompt: Prompt, params: Params) -> tuple[str | None, list[int], str]:
        """(text, token ids, cache salt) of a prompt; ``ValueError`` if it cannot be run,
        ``TypeError`` if ``params`` are no ``SamplingParams`` or ``PoolingParams``.
        """
        self.check_usable()
        if not isinstance(params, (SamplingParams, PoolingParams)):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        text, ids, salt = tokenize_prompt(prompt, self.tokenizer)
        vocab_size = self.model_config.vocab_size
        if isinstance(params, PoolingParams):
            check_prompt_ids(ids, 0, vocab_size, self.max_model_len)
            params.validate_for(self.model_config.hidden_size)
            return text, ids, salt
        check_prompt_ids(ids, params.max_tokens, vocab_size, self.max_model_len)
        params.validate_for(vocab_size, self._eos_token_ids)
        if params.use_beam_search:
            check_beam_width(params.n, self.config.max_num_seqs, self.config.max_num_batched_tokens)
        elif params.num_samples > self.config.max_num_waiting:
            name = "n" if params.best_of is None else "best_of"
            raise ValueError(
                f"{name} is {params.num_samples}, and all samples wait at once: max_num_waiting is "
                f"{self.config.max_num_waiting}"
            )
        return text, ids, salt

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests without further output; ids that are not running are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            self.end_request(name)

    def end_request(self, request_id: str) -> AnyOutput | None:
        """Aborts one request and returns what it has given, with finish_reason "abort"."""
        key = self._keys.pop(request_id, None)
        if key is None:
            return None
        state = self._requests.pop(key)
        self.client.send(AbortRequests([key]))
        return state.end("abort")

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def step(self) -> list[AnyOutput]:
        """Waits for the next news and returns it.

        In one process this runs one step of the model; where scheduling is asynchronous, it begins
        one and waits for the one before. The list may be empty: a prompt was computed in part, the
        output kind asks for silence, or nothing is unfinished. A request that failed ends with
        finish_reason "error" and says why in ``error``; others go on. Raises ``EngineDeadError`` if
        the engine is gone. An exception such as KeyboardInterrupt aborts every request, since
        outputs may be lost.
        """
        self.check_usable()
        if not self._requests:
            return []
        try:
            return [output for output, _ in self.process(self.client.receive())]
        except Exception:
            raise
        except BaseException:
            self.abort_request(list(self._keys))
            raise

    def process(self, news: EngineOutputs) -> list[tuple[AnyOutput, Exception | None]]:
        """Turns the engine core's news into outputs, each with the error that ended its request, if
        one did.
        """
        self._core_stats = news.stats
        results: list[tuple[AnyOutput, Exception | None]] = []
        for output in news.outputs:
            state = self._requests.get(output.key)
            if state is None:
                continue  # aborted meanwhile, or failed with another of its samples
            made: AnyOutput | None
            error: Exception | None = None
            if output.message is None:
                made = state.update(output)
            else:
                # One sample's failure is the request's.
                error = failure_of(output)
                made = state.end("error", output.message)
                if state.num_samples > 1:
                    self.client.send(AbortRequests([state.key]))
            if state.finished:
                del self._requests[state.key]
                del self._keys[state.request_id]
            if made is not None:
                results.append((made, error))
        return results

    # --- state ------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The engine core's state, at its last news if anything is unfinished."""
        if not self._requests and not self._closed:
            # Nobody calls step() for what comes after the last abort.
            while (news := self.client.receive_now()) is not None:
                self.process(news)
        return self.last_stats()

    def last_stats(self) -> EngineStats:
        """As it was at the last news. Unlike all else, any thread may ask at any time."""
        core = self._core_stats
        return EngineStats(
            num_running=core.num_running,
            num_waiting=core.num_waiting,
            kv_used_blocks=core.kv_used_blocks,
            kv_total_blocks=core.kv_total_blocks,
            prefix_queries=core.prefix_queries,
            prefix_hits=core.prefix_hits,
            num_preemptions=core.num_preemptions,
            num_drafts=core.num_drafts,
            num_draft_tokens=core.num_draft_tokens,
            num_accepted_tokens=core.num_accepted_tokens,
        )

    def close(self) -> None:
        """Frees the model and ends what was started. Harmless when called again, and in a fork."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        self._requests.clear()
        self._keys.clear()
        self.client.close()

    def check_usable(self) -> None:
        """Raises RuntimeError in an engine that is closed or another process's."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if os.getpid() != self._owner_pid:
            raise RuntimeError(
                f"the engine belongs to process {self._owner_pid}, of which this one "
                f"({os.getpid()}) is a fork: make an engine in the process that uses it"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def failure_of(output: SequenceOutput) -> Exception:
    """The exception for a sequence that ended with a message."""
    message = output.message or "the request failed"
    if output.finish_reason == "queue_full":
        return QueueFullError(message)
    if output.finish_reason == "refused":
        return ValueError(message)
    if output.finish_reason == "impossible":
        return ImpossibleError(message)
    return EngineError(message)


class LLMEngine(Engine):
    """``Engine`` under vLLM's name: ``LLMEngine.from_engine_args(EngineArgs(model=...))``."""

    @classmethod
    def from_engine_args(cls, args: EngineConfig) -> Self:
        return cls(**{name: getattr(args, name) for name in args.__struct_fields__})


__all__ = ["Engine", "EngineDeadError", "EngineError", "LLMEngine", "QueueFullError"]
