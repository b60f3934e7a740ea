"""Waiting for what must happen, on a machine however busy."""

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Seconds that only a failure reaches: whatever is waited for takes a few seconds of processor time
# (a server's start two, a script with two engines three), of which a loaded machine gives a tenth
# and a slow one less.
PATIENCE = 120.0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextmanager
def held(pid: int) -> Iterator[None]:
    """While the process stands still: what depends on it cannot go on, however fast it is."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def one_at_a_time(what: Path) -> Iterator[None]:
    """Tests run in several processes; of those that give the same file or folder one goes on."""
    lock = os.open(what, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
