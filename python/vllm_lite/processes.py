"""Starts an engine core and its worker as processes, and sees them end."""

import os
import select
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from vllm_lite import _core
from vllm_lite.channel import ChannelClosed, Child, open_standard_fds, stop_all
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import EngineDeadError
from vllm_lite.messages import MAX_CONSTRAINT_BYTES
from vllm_lite.model_config import ModelConfig
from vllm_lite.model_files import ModelFiles
from vllm_lite.sampling_params import MAX_LOGIT_BIAS_ENTRIES, MAX_LOGPROBS

# As many as there may be plans without a result (csrc/scheduler/scheduler.h, kMaxStepsInFlight).
_RING_SLOTS = 2
# Loading a large model from a slow disk takes minutes; so much without any sign of life means a
# hang.
_SILENCE_TIMEOUT = 600.0  # seconds

Progress = Callable[[int, int], None]


def plan_bytes_limit(config: EngineConfig, max_model_len: int, vocab_size: int) -> int:
    """Bytes that the largest step plan can have (csrc/scheduler/step_plan.h).

    Only address space: a page of the ring is memory once a plan has reached it.
    """
    blocks = -(-max_model_len // config.block_size)
    per_token = 4 * (4 + 3)
    # Every row begins in one step, with its whole table, a history, lists of every kind (allowed
    # and stop ids have no double entries), and a constraint with the output so far.
    lists = 2 * MAX_LOGIT_BIAS_ENTRIES + 2 * vocab_size
    per_row = 4 * (64 + 3 * blocks + 2 * max_model_len + lists) + MAX_CONSTRAINT_BYTES
    return config.max_num_batched_tokens * per_token + config.max_num_seqs * per_row + 4096


def result_bytes_limit(config: EngineConfig, hidden_size: int) -> int:
    """Bytes that the largest result can have: every token of the step with the most logprobs, and a
    vector of every row.
    """
    tokens = config.max_num_batched_tokens * 4 * (3 + 2 * MAX_LOGPROBS)
    return tokens + config.max_num_seqs * 4 * hidden_size + 65536


class EngineProcesses:
    """One engine core and one worker with rings between them.

    Making one starts them and returns at once; ``wait_ready`` waits. Client i listens at
    ``client_address(i)``. The directory of these addresses is needed only until every client and
    the engine core have met; ``wait_ready`` and ``ProcessClient.wait_connected``, then
    ``remove_directory``, so that nothing stays behind whatever ends this process.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        model_config: ModelConfig,
        resolved: ResolvedConfig,
        num_clients: int = 1,
    ) -> None:
        self.children: list[Child] = []
        self._death: str | None = None
        open_standard_fds()
        self.directory = _make_directory()
        self.address = f"ipc://{self.directory / 'engine'}"
        fds: list[int] = []
        try:
            plan_limit = plan_bytes_limit(config, resolved.max_model_len, model_config.vocab_size)
            for limit in (plan_limit, result_bytes_limit(config, model_config.hidden_size)):
                fds.append(_core.ShmRing.create(_RING_SLOTS, limit))
            options = {
                "config": msgspec.to_builtins(config),
                "model_path": str(files.path),
                "plan_fd": fds[0],
                "result_fd": fds[1],
                "address": self.address,
                "client_addresses": [self.client_address(i) for i in range(num_clients)],
            }
            # The worker first: loading torch and the weights takes longest.
            for role, module in (
                ("worker", "vllm_lite.worker"),
                ("engine core", "vllm_lite.engine_core"),
            ):
                child = Child(role, module, tuple(fds), self.directory)
                self.children.append(child)
                child.channel.send(options)
        except BaseException as error:
            self.stop()
            if isinstance(error, ChannelClosed):
                raise EngineDeadError(self.children[-1].describe_exit()) from error
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def client_address(self, client_id: int) -> str:
        return f"ipc://{self.directory / f'client-{client_id}'}"

    def wait_ready(self, progress: Progress | None = None) -> None:
        """Returns when both are ready. Raises EngineDeadError with the reason if one fails."""
        wait_ready(self.children, progress)

    def remove_directory(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def death_reason(self) -> str | None:
        """Why the engine is gone; None while it lives. Costs one system call."""
        if self._death is None:
            by_fd = {child.channel.fileno(): child for child in self.children}
            if -1 in by_fd:
                self._death = "the engine was stopped"
            elif readable := poll_readable(by_fd, 0):
                self._death = why_it_ended(by_fd[readable[0]])
        return self._death

    def stop(self) -> None:
        """Ends both. Harmless when called again."""
        stop_all(self.children)
        self.remove_directory()


def _make_directory() -> Path:
    """Where the sockets are; the owner's alone."""
    # The path of a socket has at most 107 bytes.
    is_short = len(os.fsencode(tempfile.gettempdir())) < 70
    return Path(tempfile.mkdtemp(prefix="vllm_lite-", dir=None if is_short else "/tmp"))


def wait_ready(
    children: Iterable[Child], progress: Progress | None = None, interrupt_fd: int | None = None
) -> bool:
    """True when all have said "ready"; False if ``interrupt_fd`` became readable before.

    Raises EngineDeadError with the reason if a child fails, ends, or is silent for too long.
    """
    children = list(children)
    waiting = {child.channel.fileno() for child in children}
    by_fd = {child.channel.fileno(): child for child in children}
    while waiting:
        # Those that are ready are watched, too: they say nothing more unless they fail.
        fds = [*by_fd] if interrupt_fd is None else [*by_fd, interrupt_fd]
        buffered = [fd for fd, child in by_fd.items() if child.channel.pending()]
        readable = buffered or poll_readable(fds, _SILENCE_TIMEOUT)
        if interrupt_fd in readable:
            return False
        if not readable:
            names = ", ".join(by_fd[fd].role for fd in waiting)
            raise EngineDeadError(f"no sign of life for {_SILENCE_TIMEOUT:.0f} s from: {names}")
        for fd in readable:
            message = receive_status(by_fd[fd])
            if message["event"] == "ready":
                waiting.discard(fd)
            elif message["event"] == "kv_cache_memory":
                # The worker has measured what the engine core waits for.
                for child in children:
                    if child.role == "engine core":
                        child.channel.send(message)
            elif message["event"] == "progress" and progress is not None:
                progress(message["done"], message["total"])
    return True


def poll_readable(fds: Iterable[int], timeout: float | None) -> list[int]:
    """Those of ``fds`` that can be read, or none after ``timeout`` seconds."""
    poller = select.poll()  # select.select() cannot take descriptors above 1023
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if timeout is None else max(0.0, timeout) * 1000)]


def receive_status(child: Child) -> dict[str, Any]:
    """A child's next status message; its failure or end as EngineDeadError."""
    try:
        message = child.channel.receive()
    except ChannelClosed:
        raise EngineDeadError(child.describe_exit()) from None
    if message["event"] == "error":
        raise EngineDeadError(f"the {child.role} failed: {message['message']}")
    return message


def why_it_ended(child: Child) -> str:
    """The reason of a child whose channel has something to read after it was ready."""
    try:
        while True:
            receive_status(child)
    except EngineDeadError as error:
        return str(error)
