"""Where a GPU benchmark runs, how it times kernels, and the lines it prints.

In a dry run (``--dry-run``) a script goes through tiny sizes on the host layer of the tests, to see
that it works: kernels run once, their results are checked, and no line has a figure.
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from vllm_lite import ops

ROOT = Path(__file__).parents[2]
# Several times the L2 cache of any GPU.
_FLUSH_BYTES = 512 << 20
_WARM_UPS = 3

T = TypeVar("T")
Figure = float | str | None


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run, so that a figure's share is of what this device gave just then."""

    copy_bandwidth: float  # bytes/s, read and written
    bf16_flops: float  # FLOP/s of an 8192^3 product of random numbers
    launch: float  # seconds: what kernel_seconds() says of a kernel that does nothing


class Bench:
    """Made by ``start``."""

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.device = "cpu" if dry_run else "cuda"
        self.num_multiprocessors = 4
        self._flush_buffer: torch.Tensor | None = None
        if not dry_run:
            properties = torch.cuda.get_device_properties("cuda")
            self.num_multiprocessors = properties.multi_processor_count
        self.ceilings = self._measure_ceilings()

    def pick(self, real: T, tiny: T) -> T:
        return tiny if self.dry_run else real

    def kernel_seconds(
        self, run: Callable[[], object], *, cold: bool = True, repeats: int = 20
    ) -> float:
        """Median time of one ``run``, which launches and does not wait. 1.0 in a dry run.

        cold: the L2 cache holds nothing that ``run`` reads. The work is captured into a CUDA graph,
        so that the host's launch time does not count; what is left of it is ``Ceilings.launch``.
        """
        run()
        if self.dry_run:
            return 1.0
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(repeats + _WARM_UPS):
            # The flush also keeps the device busy until the host has launched what follows.
            if cold:
                self._flush_cache()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e-3)
        times = sorted(times[_WARM_UPS:])
        return times[len(times) // 2]

    def wall_seconds(self, run: Callable[[], object], *, repeats: int = 10) -> float:
        """Median time until all that ``run`` launches is done, host included; 1.0 in a dry run."""
        run()
        if self.dry_run:
            return 1.0
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2]

    def report(self, stage: str, name: str, seconds: float, **figures: Figure) -> None:
        """One JSON line, which ``gpu_check.sh`` collects. Figures that are None are left out."""
        line: dict[str, float | str] = {"stage": stage, "name": name}
        for key, value in {"us": seconds * 1e6, **figures}.items():
            if isinstance(value, float):
                assert math.isfinite(value), f"{name}: {key} is {value}"
                value = "-" if self.dry_run else float(f"{value:.4g}")
            if value is not None:
                line[key] = value
        print(json.dumps(line), flush=True)

    def release_memory(self) -> None:
        """Gives back what torch keeps for later: the next engine's worker may need it."""
        self._flush_buffer = None
        gc.collect()
        if not self.dry_run:
            torch.cuda.empty_cache()

    def _flush_cache(self) -> None:
        """By reading: lines that were written would go to memory while the next kernel is timed."""
        if self._flush_buffer is None:
            self._flush_buffer = torch.zeros(_FLUSH_BYTES // 4, device="cuda")
        self._flush_buffer.sum()

    def _measure_ceilings(self) -> Ceilings:
        elements, size = self.pick((1 << 29, 8192), (1 << 10, 64))  # 2 GiB
        source = torch.randn(elements, device=self.device)
        target = torch.empty_like(source)
        copy = self.kernel_seconds(lambda: target.copy_(source), cold=False)
        a, b = torch.randn(2, size, size, device=self.device).bfloat16()
        out = torch.empty_like(a)
        product = self.kernel_seconds(lambda: torch.mm(a, b, out=out), cold=False)
        one = torch.zeros(1, device=self.device)
        ceilings = Ceilings(
            copy_bandwidth=2 * elements * 4 / copy,
            bf16_flops=2 * size**3 / product,
            launch=self.kernel_seconds(lambda: one.zero_()),
        )
        self.report(
            "ceilings", "copy, bf16 product, empty kernel", ceilings.launch,
            copy_gb_per_s=ceilings.copy_bandwidth / 1e9, bf16_tflops=ceilings.bf16_flops / 1e12,
        )  # fmt: skip
        return ceilings


def start(parser: argparse.ArgumentParser) -> tuple[Bench, argparse.Namespace]:
    """Parses the command line, prepares the device and prints its ceilings."""
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the host layer")
    arguments = parser.parse_args()
    if arguments.dry_run:
        from ops.on_host import OnHostOps, load_on_host

        load_on_host()
        ops._ops = OnHostOps()
    elif not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --dry-run needs none")
    elif not ops.has_cuda_kernels():
        parser.error("vllm_lite was built without CUDA kernels: -DVLLM_LITE_CUDA=ON builds them")
    return Bench(arguments.dry_run), arguments
