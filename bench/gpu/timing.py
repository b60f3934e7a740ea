"""Times of CUDA kernels, and the ceilings of the device that they are held against."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run, so that a figure's share is of what this device gave just then."""

    copy_bandwidth: float  # bytes/s, read and written
    bf16_flops: float  # FLOP/s of an 8192^3 product of random numbers


def measure_ceilings() -> Ceilings:
    source = torch.randn(1 << 29, device="cuda")  # 2 GiB
    target = torch.empty_like(source)
    copy = kernel_seconds(lambda: target.copy_(source), cold=False)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    product = kernel_seconds(lambda: torch.mm(a, b, out=out), cold=False)
    return Ceilings(2 * source.numel() * 4 / copy, 2 * 8192**3 / product)


class _L2Flush:
    """Overwrites the L2 cache, so that a kernel reads its inputs from memory."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def __call__(self) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self._buffer.zero_()


_flush = _L2Flush()


def kernel_seconds(run: Callable[[], object], *, cold: bool = True, repeats: int = 20) -> float:
    """Median time of one ``run``, which launches and does not wait.

    cold: with the L2 cache flushed before each. The work is captured into a CUDA graph, so that
    the host's launch time does not count.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 3):
        if cold:
            _flush()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    times = sorted(times[3:])
    return times[len(times) // 2]


def report(stage: str, name: str, seconds: float, **figures: float | str | None) -> None:
    """One JSON line, which ``gpu_check.sh`` collects."""
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
    line = {"stage": stage, "name": name, "us": float(f"{seconds * 1e6:.4g}"), **rounded}
    print(json.dumps(line), flush=True)
