"""Finds what a program leaves behind: processes, shared memory, files in its TMPDIR."""

import os
import secrets
import tempfile
import time
from pathlib import Path

from waiting import PATIENCE

_MARK = "VLLM_LITE_TEST_MARK"


class Leftovers:
    """Run a program with ``environment``; its children inherit the mark in it."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(16)
        # Not pytest's: of a long path the engine makes no use, as it has sockets there.
        self._directory = tempfile.TemporaryDirectory(prefix="left-", ignore_cleanup_errors=True)
        self._shared_memory = set(os.listdir("/dev/shm"))
        self.environment = {**os.environ, _MARK: self._value, "TMPDIR": self._directory.name}

    def processes(self, but: int | None = None) -> dict[int, str]:
        """Process id to command line of those that live and carry the mark."""
        mark = f"{_MARK}={self._value}".encode()
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == but:
                continue
            try:
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry)] = command.decode(errors="replace")
            except OSError:
                continue  # ended meanwhile
        return found

    def of_role(self, module: str) -> int:
        """The process id of the one child that was started as ``-m module``."""
        found = [pid for pid, line in self.processes().items() if f"-m {module} " in line]
        assert len(found) == 1, self.processes()
        return found[0]

    def files(self) -> list[str]:
        # Torch keeps an empty directory of its own.
        return [name for name in os.listdir(self._directory.name) if name.startswith("vllm_lite")]

    def assert_none(self) -> None:
        """The program has ended; so must everything of it."""
        end = time.monotonic() + PATIENCE
        while self._left() and time.monotonic() < end:
            time.sleep(0.02)
        assert self._left() == []

    def _left(self) -> list[str]:
        shared = set(os.listdir("/dev/shm")) - self._shared_memory
        return [*self.processes().values(), *self.files(), *shared]
