"""Offline generation: many prompts in, all answers out."""

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

from msgspec.structs import replace
from tqdm import tqdm  # type: ignore[import-untyped]

from vllm_lite.engine import AnyOutput, Engine, Params
from vllm_lite.errors import EngineDeadError, EngineError
from vllm_lite.metrics import Metric, Metrics, RequestWatch
from vllm_lite.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from vllm_lite.pooling_params import PoolingParams
from vllm_lite.requests import Prompt
from vllm_lite.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm_lite.scoring import pair_up, score_of, score_params, score_prompt
from vllm_lite.stats import EngineStats
from vllm_lite.tokenizer import Tokenizer

Message = dict[str, Any]
P = TypeVar("P", bound=Params)


class LLM:
    """``LLM("smollm2").generate(["Hello"], SamplingParams(max_tokens=32))``.

    ``options`` are ``EngineConfig``'s fields. Works at module level, in a notebook and in a thread;
    nothing is started but the kernels' threads. Calls from several threads run one after
    another. ``with LLM(...) as llm`` frees the model at the end.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        with _LoadingBar() as update:
            self.engine = Engine(model, progress=update, **options)
        self._metrics = Metrics(self.engine.config.served_model_names[0], self._stats)
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One ``RequestOutput`` per prompt, in their order.

        prompts: a text, token ids, a dictionary with ``prompt`` or ``prompt_token_ids``, or a list
        of these; sampling_params: one for all, or one per prompt.

        Raises ``ValueError`` for a prompt or parameter that cannot be run (nothing is generated
        then), ``TypeError`` for what is no ``SamplingParams``, ``EngineDeadError`` when another
        thread closes the engine meanwhile. A request that failed while it ran has finish_reason
        "error" and says why in ``error``.
        """
        prompt_list = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _of_each("sampling_params", sampling_params, SamplingParams, len(prompt_list))
        priorities = [0] * len(prompt_list) if priority is None else list(priority)
        if len(priorities) != len(prompt_list):
            raise ValueError(f"{len(priorities)} priorities for {len(prompt_list)} prompts")
        return cast(list[RequestOutput], self._run(prompt_list, params, priorities, use_tqdm))

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several; the model's chat template makes the prompts."""
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise ValueError(
                "messages must be a list of messages, or of conversations, got "
                f"{type(messages).__name__}"
            )
        if messages and isinstance(messages[0], dict):
            conversations = [messages]
        else:
            conversations = cast(list[list[Message]], messages)
        prompts: list[Prompt] = [
            self.engine.tokenizer.encode_chat(
                conversation,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """One vector per prompt, in their order; prompts and errors are those of ``generate``."""
        prompt_list = _as_list(prompts)
        if pooling_params is None:
            pooling_params = PoolingParams()
        params = _of_each("pooling_params", pooling_params, PoolingParams, len(prompt_list))
        outputs = self._run(prompt_list, params, [0] * len(prompt_list), use_tqdm)
        return cast(list[PoolingRequestOutput], outputs)

    # vLLM's name for the vectors of a whole prompt: ``outputs.embedding``.
    embed = encode

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well documents answer queries (``vllm_lite/scoring.py``): one query for all
        documents, or one for each. Raises ``ValueError`` for other numbers of them, and
        ``EngineError`` if a request failed.
        """
        pairs = pair_up(queries, documents)
        prompts = [score_prompt(self.engine.tokenizer, *pair) for pair in pairs]
        outputs = self.generate(
            [ids for ids, _ in prompts], [score_params(start) for _, start in prompts], use_tqdm
        )
        scored = []
        for output in outputs:
            if output.prompt_logprobs is None:
                raise EngineError(output.error or "the request failed")
            scored.append(
                ScoringRequestOutput(
                    output.request_id,
                    ScoringOutput(score_of(output.prompt_logprobs.values())),
                    output.prompt_token_ids,
                    num_cached_tokens=output.num_cached_tokens,
                )
            )
        return scored

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` best sequences of a beam search for each prompt, best first.

        prompts: as for ``generate``. Raises what ``generate`` raises, and ``EngineError`` if a
        search failed while it ran.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
        sampling_params = params.sampling_params()
        decode = self.engine.tokenizer.decode
        results = []
        for output in self.generate(prompts, sampling_params, use_tqdm):
            if output.error is not None:
                raise EngineError(output.error)
            sequences = []
            for beam in output.outputs:
                tokens = output.prompt_token_ids + beam.token_ids
                hides_last = beam.finish_reason == "stop" and not params.include_stop_str_in_output
                sequences.append(
                    BeamSearchSequence(
                        tokens=tokens,
                        logprobs=beam.logprobs or [],
                        cum_logprob=beam.cumulative_logprob or 0.0,
                        text=decode(
                            tokens[:-1] if hides_last else tokens, skip_special_tokens=False
                        ),
                        finish_reason=beam.finish_reason,
                        stop_reason=beam.stop_reason,
                    )
                )
            results.append(BeamSearchOutput(sequences))
        return results

    def get_metrics(self) -> list[Metric]:
        """What ``/metrics`` of a server shows, as objects: ``Counter``, ``Gauge`` and ``Histogram``
        of ``vllm_lite.metrics``, under vLLM's names with the prefix ``vllm_lite:``. Any thread may
        ask, also while another one generates.
        """
        return self._metrics.read()

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults with what the model's generation_config asks for."""
        defaults: dict[str, Any] = dict(self.engine.model_config.generation_defaults)
        if "max_new_tokens" in defaults:
            defaults["max_tokens"] = defaults.pop("max_new_tokens")
        return SamplingParams(**defaults)

    def close(self) -> None:
        """Frees the model; what another thread generates ends with ``EngineDeadError`` first."""
        self._closed = True
        with self._lock:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stats(self) -> EngineStats:
        if not self._lock.acquire(blocking=False):
            return self.engine.last_stats()  # the engine is another thread's just now
        try:
            return self.engine.stats()
        finally:
            self._lock.release()

    def _run(
        self,
        prompts: list[Prompt],
        params: Sequence[Params],
        priorities: list[int],
        use_tqdm: bool,
    ) -> list[AnyOutput]:
        with self._lock:
            return self._run_locked(prompts, params, priorities, use_tqdm)

    def _run_locked(
        self,
        prompts: list[Prompt],
        params: Sequence[Params],
        priorities: list[int],
        use_tqdm: bool,
    ) -> list[AnyOutput]:
        ids = [f"llm-{next(self._ids)}" for _ in prompts]
        results: dict[str, AnyOutput] = {}
        watches: dict[str, RequestWatch] = {}
        bar = tqdm(total=len(prompts), desc="generating", unit="prompt", disable=not use_tqdm,
                   dynamic_ncols=True)  # fmt: skip
        num_tokens = 0
        waiting = list(range(len(prompts)))[::-1]
        try:
            # All are checked before any is started, so that a bad one costs nothing.
            checked: list[Prompt] = []
            lengths: list[int] = []
            for prompt, param in zip(prompts, params, strict=True):
                text, token_ids, salt = self.engine.check_request(prompt, param)
                checked.append({"prompt": text, "prompt_token_ids": token_ids, "cache_salt": salt})
                lengths.append(len(token_ids))
            in_flight = 0  # samples
            samples_of: dict[str, int] = {}
            while waiting or self.engine.has_unfinished_requests():
                while waiting and (
                    in_flight == 0
                    or in_flight + num_samples(params[waiting[-1]])
                    <= self.engine.config.max_num_waiting
                ):
                    index = waiting.pop()
                    final = params[index]
                    if isinstance(final, SamplingParams):
                        final = replace(final, output_kind=RequestOutputKind.FINAL_ONLY)
                        watches[ids[index]] = self._metrics.watch(lengths[index], stream=False)
                    self.engine.add_request(ids[index], checked[index], final, priorities[index])
                    in_flight += num_samples(final)
                    samples_of[ids[index]] = num_samples(final)
                if self._closed:
                    raise EngineDeadError("the engine was closed while it was generating")
                for output in self.engine.step():
                    results[output.request_id] = output
                    in_flight -= samples_of.pop(output.request_id)
                    if isinstance(output, RequestOutput):
                        watches.pop(output.request_id).end(output)
                        num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
                    else:
                        num_tokens += len(output.prompt_token_ids)
                    bar.update()
                    if elapsed := bar.format_dict["elapsed"]:
                        bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tokens/s", refresh=False)
        except BaseException:
            self.engine.abort_request(ids)
            for watch in watches.values():
                watch.finish("abort")
            raise
        finally:
            bar.close()
        return [results[request_id] for request_id in ids]


def num_samples(params: Params) -> int:
    return params.num_samples if isinstance(params, SamplingParams) else 1


def _of_each(name: str, given: P | Sequence[P], kind: type[P], count: int) -> list[P]:
    """As many as there are prompts."""
    if isinstance(given, kind):
        return [given] * count
    params: list[P] = list(given) if isinstance(given, Iterable) else [given]
    for one in params:
        if not isinstance(one, kind):
            raise TypeError(
                f"{name} must be {kind.__name__} or a list of them, got {type(one).__name__}"
            )
    if len(params) != count:
        raise ValueError(f"{len(params)} {name} for {count} prompts")
    return params


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(
            "prompts must be text, token ids, a dictionary or a list of these, got "
            f"{type(prompts).__name__}"
        )
    if prompts and all(type(item) is int for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


class _LoadingBar:
    """A progress bar over the bytes of the weights; shows nothing if loading is over at once."""

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar = tqdm(desc="loading weights", unit="B", unit_scale=True, delay=0.2,
                         dynamic_ncols=True)  # fmt: skip
        return self._update

    def _update(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
