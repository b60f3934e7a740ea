"""Runs step plans on one device: block tables and KV arena, the model, the sampler."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import torch

from vllm_lite import ops
from vllm_lite.config import EngineConfig, ResolvedConfig, kv_row_size
from vllm_lite.cores import cores, num_available_cores
from vllm_lite.model_config import ModelConfig
from vllm_lite.model_files import ModelFiles
from vllm_lite.models import load_model
from vllm_lite.tokenizer import Tokenizer, load_tokenizer
from vllm_lite.worker.cpu import RecordedForward
from vllm_lite.worker.cuda import (
    DecodeGraphs,
    check_device,
    graph_sizes,
    measured_kv_memory,
    unmeasured_bytes,
)
from vllm_lite.worker.hidden_states import Pooler, PromptScorer
from vllm_lite.worker.largest_step import largest_plan
from vllm_lite.worker.sampler import PendingResult, Sampler
from vllm_lite.worker.step_inputs import InputSizes, StepInputs, upload
from vllm_lite.worker.step_plan import StepPlan, encode_error, step_words_of
from vllm_lite.worker.token_masks import StepMasks, TokenMasks

logger = logging.getLogger(__name__)

# The process that has started the kernels' threads. A fork inherits the number, not the threads.
_threads_pid: int | None = None


def _check_not_forked() -> None:
    """Raises RuntimeError where threads are missing that fork() left behind."""
    global _threads_pid
    if _threads_pid not in (None, os.getpid()):
        raise RuntimeError(
            f"this process was forked from process {_threads_pid} after an engine had run there, "
            "and its threads do not survive fork(): give the engine processes of its own with "
            "multiprocess=True, or start this process with multiprocessing's 'spawn' method"
        )
    _threads_pid = os.getpid()


class BegunStep:
    """A step that the worker has begun, or has failed to begin."""

    def __init__(self, step_words: list[int], result: PendingResult | Exception) -> None:
        self._step_words = step_words
        self._result = result

    @property
    def is_pending(self) -> bool:
        """The device is at it; ``answer`` would wait."""
        return isinstance(self._result, PendingResult) and self._result.is_pending

    def answer(self) -> bytes:
        """The words of its result, or of its error."""
        if isinstance(self._result, Exception):
            return _error_words(self._step_words, self._result)
        try:
            return self._result.wait()
        except Exception as error:
            logger.exception("a step failed")
            return _error_words(self._step_words, error)


def _error_words(step_words: list[int], error: Exception) -> bytes:
    return encode_error(step_words, f"{type(error).__name__}: {error}")


def _text_of(files: ModelFiles, model_config: ModelConfig) -> tuple[Tokenizer, list[int]]:
    """The tokenizer and the ids that end an output."""
    tokenizer = load_tokenizer(files)
    return tokenizer, list(dict.fromkeys([*model_config.eos_token_ids, *tokenizer.eos_token_ids]))


class Worker:
    """Decides nothing: executes what the engine core plans.

    ``progress(bytes_done, bytes_total)`` follows the loading of the weights. ``resolved`` is what
    was given, completed by what the device has room for. Raises RuntimeError in a fork of a process
    that has had a worker.
    """

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedConfig,
        files: ModelFiles,
        model_config: ModelConfig,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        _check_not_forked()
        # The kernels have threads of their own; torch's would only compete with them.
        torch.set_num_threads(1)
        self._num_threads = config.num_threads or num_available_cores()
        ops.set_num_threads(self._num_threads)
        self._device = torch.device(resolved.device)
        if resolved.device == "cuda":
            check_device()
        self._config = config
        self._model_config = model_config
        self._kv_cache_dtype = resolved.kv_cache_dtype
        dtype: torch.dtype = getattr(torch, resolved.dtype)
        self.model = load_model(
            files, model_config, dtype, resolved.max_model_len, progress, self._device,
            random_weights=config.load_format == "dummy", quantization=config.quantization,
        )  # fmt: skip
        if resolved.device == "cuda":
            # Graphs know the place of what a step computes in, so it must not move.
            self.model.reserve(config.max_num_batched_tokens, config.max_num_logits)
        self._max_model_len = resolved.max_model_len
        max_blocks = -(-resolved.max_model_len // config.block_size)
        self._block_tables = torch.zeros(
            config.max_num_seqs, max_blocks, dtype=torch.int32, device=self._device
        )
        self._sampler = self._make_sampler()
        self._token_masks = TokenMasks(
            model_config.vocab_size, self._device, lambda: _text_of(files, model_config)
        )
        self._scorer = PromptScorer(self._device)
        self._pooler = Pooler(config.max_num_seqs, model_config.hidden_size, self._device)
        self._workspace: torch.Tensor | None = None
        self._num_multiprocessors = 0
        if resolved.device == "cuda":
            size = ops.attention_workspace_size(model_config.num_kv_heads, model_config.head_size)
            self._workspace = torch.empty(size, device=self._device)
            properties = torch.cuda.get_device_properties(self._device)
            self._num_multiprocessors = properties.multi_processor_count
        self._recorded: RecordedForward | None = None
        self._graphs: DecodeGraphs | None = None
        if resolved.num_blocks is None:
            memory = measured_kv_memory(
                config.gpu_memory_utilization, self._unmeasured_bytes(), self._run_largest_step
            )
            resolved = msgspec.structs.replace(config, kv_cache_memory=memory).resolve(model_config)
        assert resolved.num_blocks is not None
        self.resolved = resolved
        self.kv_cache_memory = resolved.num_blocks * resolved.block_bytes
        self.kv_arena = self._make_arena(resolved.num_blocks)
        if resolved.device == "cpu":
            largest = InputSizes(
                config.max_num_batched_tokens, config.max_num_seqs, config.max_num_logits
            )
            self._recorded = RecordedForward(self.model, self._make_inputs(largest), self.kv_arena)
        if resolved.device == "cuda" and not config.enforce_eager:
            self._graphs = DecodeGraphs(
                config.max_num_seqs,
                lambda num_seqs: self._make_inputs(self._input_sizes(num_seqs, num_seqs, num_seqs)),
                self._forward,
            )
        logger.info(
            "%s, %s, max_model_len %d, KV cache %.2f GiB (%d tokens, %s)",
            resolved.device,
            resolved.dtype,
            resolved.max_model_len,
            self.kv_cache_memory / 2**30,
            resolved.num_blocks * config.block_size,
            resolved.kv_cache_dtype,
        )

    def pin_threads(self) -> None:
        """Keeps each of the kernels' threads, the caller's among them, on a core of its own.

        Only where they have all the cores that this process may use: with fewer, another engine
        beside this one would choose the same ones.
        """
        cpus = cores()
        if self._device.type != "cpu" or len(cpus) != self._num_threads:
            return
        if not ops.pin_threads(cpus):
            logger.info("the kernels' threads cannot be pinned to cores here")

    def execute(self, plan_bytes: memoryview | bytes) -> bytes:
        """Runs one step; returns the words of its result (csrc/scheduler/step_plan.h)."""
        return self.launch(plan_bytes).wait()

    def begin(self, plan_bytes: memoryview | bytes) -> BegunStep:
        """Launches a step. What goes wrong, here or later, is its answer."""
        step_words = step_words_of(plan_bytes)
        try:
            return BegunStep(step_words, self.launch(plan_bytes))
        except Exception as error:
            logger.exception("a step failed")
            return BegunStep(step_words, error)

    @torch.inference_mode()
    def launch(self, plan_bytes: memoryview | bytes) -> PendingResult:
        """Begins a step. On a GPU it returns before the step is done; steps run in order."""
        plan = StepPlan(plan_bytes)
        masks = self._token_masks.begin(plan)
        inputs, logits, changes = self._compute(plan)
        count = plan.num_logits
        words = self._sampler.sample(
            logits[:count],
            inputs.sample_rows[:count],
            inputs.sample_positions[:count],
            plan,
            *self._masks_on_device(masks),
            inputs.batch.token_ids[inputs.batch.logits_indices[:count]]
            if plan.num_drafts
            else None,
        )
        source = self._recorded or self.model
        more: list[torch.Tensor] = []
        if plan.num_scored > 0:
            more += self._scorer.score(
                plan.split_changes(changes).scored,
                plan.max_prompt_logprobs,
                source.logits,
                self._sampler.workspace,
            )
        if plan.num_pooled > 0:
            vectors = self._pooler.pool(plan.pooled_parts(), source.hidden)
            more.append(vectors.view(torch.int32).view(-1))
        if more:
            words = torch.cat([words, *more])
        result = PendingResult(plan, self._model_config.hidden_size, words)
        self._token_masks.launched(result)
        return result

    def _masks_on_device(
        self, future: "Future[StepMasks | None] | None"
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Waits for a step's masks; with a GPU, that has the forward pass to do meanwhile."""
        made = None if future is None else future.result()
        if made is None:
            return None, None
        return (
            made.masks.to(self._device, non_blocking=True),
            made.index.to(self._device, non_blocking=True),
        )

    def _compute(self, plan: StepPlan) -> tuple[StepInputs, torch.Tensor, torch.Tensor]:
        """(the step's tensors, logits ``[num_logits or more, vocab_size]``, the words of
        ``plan.changes`` on the device)
        """
        if self._recorded is not None:
            self._apply_changes(plan, plan.changes)
            return *self._recorded.run(plan), plan.changes
        # Only a step of decodes alone has one token in each sequence, and samples from every one.
        is_decode = plan.num_tokens == plan.num_seqs == plan.num_logits
        if self._graphs is not None and is_decode:
            inputs = self._graphs.inputs_for(plan.num_seqs)
            words, changes = self._upload(plan, inputs.sizes)
            inputs.words.copy_(words)
            return inputs, self._graphs.run(inputs), changes
        sizes = self._input_sizes(plan.num_tokens, plan.num_seqs, plan.num_logits)
        words, changes = self._upload(plan, sizes)
        inputs = self._make_inputs(sizes, words)
        return inputs, self._forward(inputs), changes

    def _upload(self, plan: StepPlan, sizes: InputSizes) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes a step to the device and applies its changes there: (the words of its inputs, those
        of ``plan.changes``).
        """
        words, changes = upload(plan, sizes, self._plan_attention, self._device)
        self._apply_changes(plan, changes)
        return words, changes

    def _apply_changes(self, plan: StepPlan, words: torch.Tensor) -> None:
        """words: those of ``plan.changes``, on the device."""
        if len(words) == 0:
            return
        changes = plan.split_changes(words)
        if len(changes.new_rows):
            self._sampler.add_rows(changes, plan.row_lists())
        if len(changes.table_updates):
            rows, indices, blocks = changes.table_updates.unbind(1)
            self._block_tables.index_put_((rows, indices), blocks)
        if len(changes.block_copies):
            ops.copy_blocks(self.kv_arena, changes.block_copies)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        self.model.forward(inputs.batch, self.kv_arena)
        return self.model.logits(inputs.batch.logits_indices)

    def _input_sizes(self, num_tokens: int, num_seqs: int, num_logits: int) -> InputSizes:
        plan_words = 0
        if self._workspace is not None:
            plan_words = ops.attention_plan_size(
                num_tokens,
                num_seqs,
                self._model_config.num_heads,
                self._model_config.num_kv_heads,
                self._num_multiprocessors,
            )
        return InputSizes(num_tokens, num_seqs, num_logits, plan_words)

    def _make_inputs(self, sizes: InputSizes, words: torch.Tensor | None = None) -> StepInputs:
        """Without ``words``, inputs that keep their place from step to step."""
        if words is None:
            words = torch.zeros(sizes.num_words(), dtype=torch.int32, device=self._device)
        return StepInputs(
            sizes, words, self._block_tables, self._sampler.last_tokens, self._workspace
        )

    def _plan_attention(
        self, query_start: torch.Tensor, seq_lens: torch.Tensor, words: torch.Tensor
    ) -> None:
        config = self._model_config
        ops.plan_attention(
            query_start,
            seq_lens,
            config.num_heads,
            config.num_kv_heads,
            # A plan without a window is right for layers with one, too.
            config.sliding_window if config.all_layers_windowed else 0,
            self._num_multiprocessors,
            words,
        )

    def _make_arena(self, num_blocks: int) -> torch.Tensor:
        config = self._model_config
        shape = (
            config.num_layers, num_blocks, 2, config.num_kv_heads, self._config.block_size,
            kv_row_size(config.head_size, self._kv_cache_dtype),
        )  # fmt: skip
        # On the CPU untouched pages cost nothing, so the arena may be larger than what is used.
        # They are not huge: the layers' blocks are far apart, and to touch a huge page for the
        # first time takes milliseconds, in the middle of requests.
        return torch.empty(shape, dtype=getattr(torch, self._kv_cache_dtype), device=self._device)

    def _unmeasured_bytes(self) -> int:
        """What the device will hold beside what the largest step shows."""
        sizes = [] if self._config.enforce_eager else graph_sizes(self._config.max_num_seqs)
        inputs = [4 * self._input_sizes(size, size, size).num_words() for size in sizes]
        # What comes with the first grammar, a mask for each logit, drafts' too, and with the first
        # mean: sums of 64 bits.
        model, config = self._model_config, self._config
        masks = 4 * config.max_num_logits * -(-model.vocab_size // 32)
        sums = 8 * config.max_num_seqs * (model.hidden_size + 1)
        return unmeasured_bytes(model.num_layers, inputs) + masks + sums

    def _run_largest_step(self) -> None:
        """One step that takes as much of the device as any; what it leaves behind is dropped."""
        config = self._config
        self.kv_arena = self._make_arena(1)
        plan = largest_plan(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            self._max_model_len,
            config.block_size,
            self._model_config.vocab_size,
        )
        self.execute(plan)
        self._sampler = self._make_sampler()
        del self.kv_arena

    def _make_sampler(self) -> Sampler:
        config = self._config
        return Sampler(
            config.max_num_seqs, config.max_num_logits, self._model_config.vocab_size, self._device
        )
