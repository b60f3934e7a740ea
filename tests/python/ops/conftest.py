"""Fixtures of the op tests."""

from collections.abc import Iterator

import pytest

from ops.back_ends import CPU_PARAMS, CUDA_PARAMS, PARAMS, use


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


@pytest.fixture(params=CUDA_PARAMS)
def cuda_back_end(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test wherever CUDA kernels run."""
    with use(request.param):
        yield request.param
