"""Fixtures of the op tests."""

from collections.abc import Iterator

import pytest

from ops.back_ends import CPU_PARAMS, CUDA_PARAMS, PARAMS, use
from vllm_lite import ops


@pytest.fixture(params=PARAMS)
def back_end(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on every back end."""
    with use(request.param):
        yield request.param


@pytest.fixture(params=CPU_PARAMS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on each instruction set of this processor."""
    with use(request.param):
        yield request.param


@pytest.fixture(params=["portable", "avx2", "avx512", "avx512_bf16", "amx"])
def linear_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on each instruction set that linear has kernels for."""
    if request.param not in ops.cpu_isas():
        pytest.skip("not on this processor")
    with use(request.param):
        yield request.param


@pytest.fixture(params=CUDA_PARAMS)
def cuda_back_end(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test wherever CUDA kernels run."""
    with use(request.param):
        yield request.param
