"""The CUDA kernels on the host, for tests and for dry runs of benchmarks."""

import os
from pathlib import Path
from typing import Any

import torch

BUILD = Path(__file__).parents[3] / os.environ.get("VLLM_LITE_TEST_BUILD", "build/dev")
_LIBRARY = BUILD / "tests/cuda_on_host/_ops_cuda_on_host.so"


def load_on_host() -> None:
    """The device that the layer pretends to be is a Hopper, unless the environment says other."""
    if not _LIBRARY.exists():
        raise FileNotFoundError(f"{_LIBRARY}: `make test` builds it")
    os.environ.setdefault("CUDA_ON_HOST_COMPUTE_CAPABILITY", "90")
    torch.ops.load_library(_LIBRARY)


class OnHostOps:
    """``torch.ops.vllm_lite`` of CPU tensors with the CUDA kernels on the host where there are any.

    What goes into an op list is the CPU's.
    """

    def __init__(self) -> None:
        self._recording = False

    def __getattr__(self, name: str) -> Any:
        if name in ("op_list_begin", "op_list_end"):
            self._recording = name == "op_list_begin"
        on_host = torch.ops.vllm_lite_cuda_on_host
        is_on_host = hasattr(on_host, name) and not self._recording
        return getattr(on_host if is_on_host else torch.ops.vllm_lite, name)
