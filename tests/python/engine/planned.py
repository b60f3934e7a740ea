"""What the worker has on a GPU, for an engine of this process that runs the CUDA kernels on the
host. For tests, and for dry runs of benchmarks.
"""

import torch

from vllm_lite import LLM, ops
from vllm_lite.worker.worker import Worker


def with_plans(llm: LLM) -> Worker:
    """Makes the engine's worker plan attention, as on a GPU of four multiprocessors. Returns it."""
    worker: Worker = llm.engine.client._worker  # type: ignore[attr-defined]
    config = worker.model.config
    size = ops.attention_workspace_size(config.num_kv_heads, config.head_size)
    worker._recorded = None
    worker._workspace = torch.full((size,), torch.nan)
    worker._num_multiprocessors = 4
    rows = llm.engine.config.max_num_logits
    worker._sampler.workspace = torch.empty(
        ops.sample_workspace_bytes(rows, config.vocab_size), dtype=torch.uint8
    )
    return worker
