"""Fixtures of the op tests."""

from collections.abc import Iterator

import pytest

from vllm_lite import ops


@pytest.fixture(params=ops.cpu_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on each instruction set of this processor."""
    before = ops.current_cpu_isa()
    ops.set_cpu_isa(request.param)
    yield request.param
    ops.set_cpu_isa(before)
