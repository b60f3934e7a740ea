"""Waiting for what must happen, on a machine however busy."""

import time
from collections.abc import Callable

# Seconds that only a failure reaches: whatever is waited for takes a second or two of processor
# time, of which a loaded machine gives a tenth.
PATIENCE = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
