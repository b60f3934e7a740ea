"""Runs step plans on one device: block tables and KV arena, the model, the sampler."""

import os
from collections.abc import Callable

import torch

from vllm_lite import ops
from vllm_lite.config import EngineConfig, ResolvedConfig, available_cores
from vllm_lite.model_config import ModelConfig
from vllm_lite.model_files import ModelFiles
from vllm_lite.models import ForwardBatch, load_model
from vllm_lite.worker.sampler import Sampler
from vllm_lite.worker.step_plan import StepPlan

# The process whose torch has started threads. A fork inherits the number, but not the threads.
_threads_pid: int | None = None


def _check_not_forked() -> None:
    """Raises RuntimeError where torch would wait for ever for threads that fork() left behind."""
    global _threads_pid
    if _threads_pid not in (None, os.getpid()):
        raise RuntimeError(
            f"this process was forked from process {_threads_pid} after an engine had run there, "
            "and torch's threads do not survive fork(): give the engine processes of its own with "
            "multiprocess=True, or start this process with multiprocessing's 'spawn' method"
        )
    _threads_pid = os.getpid()


class Worker:
    """Decides nothing: executes what the engine core plans.

    ``progress(bytes_done, bytes_total)`` follows the loading of the weights. Raises RuntimeError in
    a fork of a process that has had a worker.
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
        torch.set_num_threads(config.num_threads or available_cores())
        dtype = getattr(torch, resolved.dtype)
        self.model = load_model(files, model_config, dtype, resolved.max_model_len, progress)
        # Untouched pages cost nothing, so the arena may be larger than what is used.
        self.kv_arena = torch.empty(
            model_config.num_layers,
            resolved.num_blocks,
            2,
            model_config.num_kv_heads,
            config.block_size,
            model_config.head_size,
            dtype=dtype,
        )
        max_blocks = -(-resolved.max_model_len // config.block_size)
        self._block_tables = torch.zeros(config.max_num_seqs, max_blocks, dtype=torch.int32)
        self._sampler = Sampler(config.max_num_seqs, model_config.vocab_size)

    @torch.inference_mode()
    def execute(self, plan_bytes: memoryview | bytes) -> bytes:
        """Runs one step; returns the words of its result (csrc/scheduler/step_plan.h)."""
        plan = StepPlan(plan_bytes)
        for row in plan.freed_rows:
            self._sampler.free_row(row)
        for new_row in plan.new_rows:
            self._sampler.add_row(new_row)
        if len(plan.table_updates):
            row, index, block = plan.table_updates.unbind(1)
            self._block_tables[row, index] = block
        if len(plan.block_copies):
            ops.copy_blocks(self.kv_arena, plan.block_copies.contiguous())
        batch = ForwardBatch(
            token_ids=plan.token_ids,
            positions=plan.positions,
            slot_mapping=plan.slot_mapping,
            query_start=plan.query_start,
            seq_lens=plan.seq_lens,
            rows=plan.rows,
            block_tables=self._block_tables,
            logits_indices=plan.logits_indices.long(),
        )
        logits = self.model(batch, self.kv_arena)
        return self._sampler.sample(logits, plan)
