"""Where the tests of ops run: each CPU instruction set, the CUDA kernels on the host, a device.

Tests make their tensors on the CPU and call ``vllm_lite.ops`` always. ``use`` makes those calls go
to another back end: the kernels of ``_ops_cuda_on_host.so``, or the device, where every tensor
argument is copied with its whole storage (so that strides and views stay what they are) and comes
back afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ops.on_host import OnHostOps, load_on_host
from vllm_lite import ops

CUDA_BACK_ENDS = ("cuda_on_host", "cuda")
CUDA_PARAMS = ["cuda_on_host", pytest.param("cuda", marks=pytest.mark.cuda)]
CPU_PARAMS = ops.cpu_isas()
PARAMS = [*CPU_PARAMS, *CUDA_PARAMS]


# Arguments that stay on the CPU.
HOST_ARGUMENTS = {"swap_blocks": (2,)}
# Ops that run on the host, for every back end.
HOST_OPS = (
    "plan_attention",
    "attention_plan_size",
    "attention_workspace_size",
    "allow_hopper_attention",
    "sample_workspace_bytes",
)


class DeviceOps:
    """``torch.ops.vllm_lite`` on CPU tensors, run on the CUDA device."""

    def __getattr__(self, name: str) -> Any:
        op = getattr(torch.ops.vllm_lite, name)
        if name in HOST_OPS:
            return op

        def call(*args: Any) -> Any:
            storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

            def to_device(arg: Any) -> Any:
                if not isinstance(arg, torch.Tensor):
                    return arg
                storage = arg.untyped_storage()
                if storage.data_ptr() not in storages:
                    host = torch.empty(0, dtype=torch.uint8).set_(storage)
                    storages[storage.data_ptr()] = (host, host.cuda())
                device = storages[storage.data_ptr()][1].untyped_storage()
                return torch.empty(0, dtype=arg.dtype, device="cuda").set_(
                    device, arg.storage_offset(), arg.size(), arg.stride()
                )

            # The stream is the last argument of every op that runs on a device.
            stream = torch.cuda.current_stream().cuda_stream
            stay = HOST_ARGUMENTS.get(name, ())
            on_device = [
                arg if index in stay else to_device(arg) for index, arg in enumerate(args[:-1])
            ]
            result = op(*on_device, stream)
            for host, device in storages.values():
                host.copy_(device)
            return result

        return call


def runs_cuda_kernels() -> bool:
    return ops._ops is not torch.ops.vllm_lite


def make_plan(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    sliding_window: int = 0,
    num_multiprocessors: int = 132,
) -> dict[str, torch.Tensor]:
    """The ``plan`` and ``workspace`` of a call of ``ops.paged_attention``."""
    heads, kv_heads, head_size = query.shape[1], kv_cache.shape[2], query.shape[2]
    size = ops.attention_plan_size(len(query), len(seq_lens), heads, kv_heads, num_multiprocessors)
    plan = torch.empty(size, dtype=torch.int32)
    words = ops.plan_attention(
        query_start, seq_lens, heads, kv_heads, sliding_window, num_multiprocessors, plan
    )
    workspace = torch.full((ops.attention_workspace_size(kv_heads, head_size),), torch.nan)
    return {"plan": plan[:words].clone(), "workspace": workspace}


def _with_plan(paged_attention: Callable[..., None]) -> Callable[..., None]:
    """``ops.paged_attention`` that makes the plan and workspace where the test gives none."""

    def call(out, query, kv_cache, tables, rows, query_start, seq_lens, scale, *more, **named):  # type: ignore[no-untyped-def]
        if "plan" not in named:
            window = more[0] if more else named.get("sliding_window", 0)
            named |= make_plan(query, kv_cache, query_start, seq_lens, window)
        ints = (tables, rows, query_start, seq_lens)
        paged_attention(out, query, kv_cache, *ints, scale, *more, **named)

    return call


@contextmanager
def use(back_end: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if back_end in CUDA_BACK_ENDS:
            patch.setattr(ops, "paged_attention", _with_plan(ops.paged_attention))
        if back_end == "cuda":
            patch.setattr(ops, "_ops", DeviceOps())
            yield
        elif back_end == "cuda_on_host":
            load_on_host()
            patch.setattr(ops, "_ops", OnHostOps())
            yield
        else:
            before = ops.current_cpu_isa()
            ops.set_cpu_isa(back_end)
            yield
            ops.set_cpu_isa(before)
