"""Starts an engine core and its worker as processes, and sees them end."""

import json
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from vllm_lite import _core
from vllm_lite.channel import Channel, ChannelClosed, Child
from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineDeadError

# Messages of the rings between engine core and worker. Plans hold token ids, positions, slots and block-table changes
# of one step, and the histories of rows that begin with penalties.
_RING_SLOTS = 2
_STARTUP_TIMEOUT = 600.0  # seconds; loading a large model from a slow disk takes minutes


def plan_bytes_limit(config: EngineConfig, max_model_len: int, vocab_size: int) -> int:
    """Bytes that the largest step plan can have (csrc/scheduler/step_plan.h)."""
    blocks = -(-max_model_len // config.block_size)
    per_token = 4 * 4
    # Worst case: every row begins in one step, with its whole table, a history and lists of every kind.
    per_row = 4 * (8 + 3 * blocks + 32 + max_model_len + 2 * 1024 + vocab_size)
    return config.max_num_batched_tokens * per_token + config.max_num_seqs * per_row + 4096


def result_bytes_limit(config: EngineConfig, max_logprobs: int) -> int:
    return config.max_num_seqs * 4 * (3 + 2 * max_logprobs) + 65536


class EngineProcesses:
    """One engine core and one worker with rings between them.

    ``client_addresses[i]`` is where client i listens. Starting them returns at once; ``wait_ready`` waits.
    """

    def __init__(
        self, config: EngineConfig, directory: Path, client_addresses: list[str]
    ) -> None:
        from vllm_lite.model_config import load_model_config
        from vllm_lite.model_files import find_model
        from vllm_lite.sampling_params import MAX_LOGPROBS

        self.address = f"ipc://{directory / 'engine'}"
        model_config = load_model_config(find_model(config.model))
        resolved = config.resolve(model_config)
        plan_limit = plan_bytes_limit(config, resolved.max_model_len, model_config.vocab_size)
        result_limit = result_bytes_limit(config, MAX_LOGPROBS)
        plan_fd = _core.ShmRing.create(_RING_SLOTS, plan_limit)
        result_fd = _core.ShmRing.create(_RING_SLOTS, result_limit)
        self._death: str | None = None
        self._stopping = False
        self._watcher: threading.Thread | None = None
        self._children: list[Child] = []
        options = {
            "config": json.loads(msgspec.json.encode(config)),
            "plan_fd": plan_fd,
            "result_fd": result_fd,
        }
        try:
            fds = (plan_fd, result_fd)
            # The worker first: loading torch and the weights takes longest.
            for role, module in (("worker", "vllm_lite.worker"), ("engine core", "vllm_lite.engine_core")):
                child = Child(role, module, fds)
                self._children.append(child)
                child.channel.send(
                    {**options, "address": self.address, "client_addresses": client_addresses}
                )
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(plan_fd)
            os.close(result_fd)

    @property
    def children(self) -> list[Child]:
        return self._children

    def wait_ready(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Returns when both are ready. Raises EngineDeadError with the reason if one is not to be."""
        waiting: dict[int, Child] = {child.channel.fileno(): child for child in self._children}
        while waiting:
            buffered = [fd for fd, child in waiting.items() if child.channel.pending()]
            readable = buffered or select.select(list(waiting), [], [], _STARTUP_TIMEOUT)[0]
            if not readable:
                names = ", ".join(child.role for child in waiting.values())
                raise EngineDeadError(f"not ready after {_STARTUP_TIMEOUT:.0f} s: {names}")
            for fd in readable:
                child = waiting[fd]
                message = receive_status(child)
                if message["event"] == "ready":
                    del waiting[fd]
                elif message["event"] == "progress" and progress is not None:
                    progress(message["done"], message["total"])

    def watch(self) -> None:
        """Follows the processes in a thread, so that ``death_reason`` knows."""
        self._watcher = threading.Thread(target=self._follow, name="vllm_lite-watch", daemon=True)
        self._watcher.start()

    def _follow(self) -> None:
        channels: dict[int, Child] = {child.channel.fileno(): child for child in self._children}
        # A child's end of the channel closes when it dies, and at no other time.
        readable, _, _ = select.select(list(channels), [], [])
        if not self._stopping:
            self._death = why_it_ended(channels[readable[0]])

    def death_reason(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        return self._death

    def stop(self) -> None:
        self._stopping = True
        for child in self._children:
            child.stop()


def receive_status(child: Child) -> dict[str, object]:
    """A child's next status message; its failure or end as EngineDeadError."""
    try:
        message = child.channel.receive()
    except ChannelClosed:
        raise EngineDeadError(child.describe_exit()) from None
    if message["event"] == "error":
        raise EngineDeadError(f"{child.role}: {message['message']}")
    return message


def why_it_ended(child: Child) -> str:
    try:
        while True:
            receive_status(child)
    except EngineDeadError as error:
        return str(error)


__all__ = ["Channel", "EngineProcesses", "receive_status", "why_it_ended"]
