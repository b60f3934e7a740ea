"""How a front end reaches its engine core: in this process, or over ZeroMQ in another one."""

import os
import weakref
from contextlib import suppress
from typing import Protocol

import msgspec
import zmq

from vllm_lite import _core
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import EngineDeadError
from vllm_lite.messages import (
    AbortRequests,
    AddRequest,
    EngineOutputs,
    Hello,
    ToEngineCore,
    decode_outputs,
    encode,
)
from vllm_lite.model_config import ModelConfig
from vllm_lite.model_files import ModelFiles
from vllm_lite.processes import EngineProcesses, Progress
from vllm_lite.token_table import TokenTableData
from vllm_lite.tokenizer import Tokenizer


class CoreClient(Protocol):
    client_id: int

    def send(self, message: AddRequest | AbortRequests) -> None: ...
    def receive(self) -> EngineOutputs:
        """Blocks until there is news. Raises EngineDeadError if none can come any more."""

    def receive_now(self) -> EngineOutputs | None:
        """News that is there without waiting. REQUIRES: nothing is unfinished."""

    def close(self) -> None:
        """Harmless when called again."""


def make_core(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model_config: ModelConfig,
    table: TokenTableData,
    num_clients: int,
    async_scheduling: bool,
) -> _core.EngineCore:
    assert resolved.num_blocks is not None
    speculative = config.speculative_config
    least, most = (0, 0) if speculative is None else speculative.ngram_lengths
    return _core.EngineCore(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        max_num_waiting=config.max_num_waiting,
        max_chunk_tokens=config.max_chunk_tokens,
        policy=config.scheduling_policy,
        num_blocks=resolved.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        sliding_window=model_config.sliding_window if model_config.all_layers_windowed else 0,
        num_clients=num_clients,
        async_scheduling=async_scheduling,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
        prompt_lookup_min=least,
        prompt_lookup_max=most,
        max_num_logits=config.max_num_logits,
        tokens=_core.make_token_table(
            table.bytes, table.offsets.tobytes(), bytes(table.kinds), table.decoding
        ),
    )


def deliver(core: _core.EngineCore, message: ToEngineCore) -> None:
    """Hands one message to the engine core."""
    if isinstance(message, AddRequest):
        core.submit(**msgspec.structs.asdict(message))
    elif isinstance(message, AbortRequests):
        for key in message.keys:
            core.abort(key)


class InProcessClient:
    """Engine core and worker as objects of this process; ``receive`` drives both.

    Where scheduling is asynchronous and the device works by itself, a step stays in flight between
    two calls, and the next one is launched before its result is waited for.
    """

    client_id = 0

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedConfig,
        files: ModelFiles,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        progress: Progress | None,
    ) -> None:
        # Imports torch, which front ends with a worker elsewhere do without.
        from vllm_lite.worker.worker import BegunStep, Worker

        self._worker: Worker = Worker(config, resolved, files, model_config, progress)
        self._is_async = self._worker.resolved.async_scheduling
        self._core: _core.EngineCore = make_core(
            config,
            self._worker.resolved,
            model_config,
            tokenizer.token_table(),
            1,
            self._is_async,
        )
        self._in_flight: BegunStep | None = None
        self._is_closed = False

    def send(self, message: AddRequest | AbortRequests) -> None:
        deliver(self._core, message)

    def receive(self) -> EngineOutputs:
        try:
            return self._receive()
        except BaseException:
            # KeyboardInterrupt, anywhere: the steps under way are lost, and with them their
            # requests. What the device still does of them comes before all that follows.
            self._in_flight = None
            with suppress(_core.InternalError):  # there is none
                self._core.fail_step("interrupted")
            raise

    def _receive(self) -> EngineOutputs:
        while True:
            before = self._in_flight
            plan = self._core.begin_step()
            begun = None if plan is None else self._worker.begin(plan)
            self._in_flight = begun
            if before is not None:
                self._core.finish_step(before.answer())
            if begun is not None and not (self._is_async and begun.is_pending):
                self._in_flight = None
                self._core.finish_step(begun.answer())
            news = self._core.take_outputs(self.client_id)
            if news is not None:
                return decode_outputs(news)
            if before is None and begun is None:
                raise EngineDeadError("the engine has nothing to do, but requests are unfinished")

    def receive_now(self) -> EngineOutputs | None:
        if self._core.begin_step() is not None:
            self._core.fail_step("nobody waits for this request")
            self._in_flight = None
        news = self._core.take_outputs(self.client_id)
        return None if news is None else decode_outputs(news)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._core.stop()
        if self._in_flight is not None:
            self._in_flight.answer()  # the device is done with what is freed now
        del self._core, self._worker, self._in_flight


class ProcessClient:
    """An engine core in another process: requests pushed to its address, news pulled from ours.

    ``processes``: the engine's, if they are this client's own; they end with it, also when it is
    dropped or the program exits. Call ``wait_connected`` before anything else.
    """

    def __init__(
        self,
        engine_address: str,
        own_address: str,
        client_id: int = 0,
        processes: EngineProcesses | None = None,
    ) -> None:
        self.client_id = client_id
        self._processes = processes
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._push = context.socket(zmq.PUSH)
        self._pull = context.socket(zmq.PULL)
        self._close = weakref.finalize(
            self, _close, os.getpid(), processes, context, (self._push, self._pull)
        )
        for socket in (self._push, self._pull):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self._pull.bind(own_address)
        self._push.connect(engine_address)
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        for fd in self.death_fds():
            self._poller.register(fd, zmq.POLLIN)
        self._push.send(encode(Hello(client_id)))

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        resolved: ResolvedConfig,
        files: ModelFiles,
        model_config: ModelConfig,
        progress: Progress | None = None,
    ) -> "ProcessClient":
        """Starts an engine core and a worker for this client alone; returns when they are ready."""
        processes = EngineProcesses(config, files, model_config, resolved)
        try:
            client = cls(processes.address, processes.client_address(0), 0, processes)
            processes.wait_ready(progress)
            client.wait_connected()
        except BaseException:
            processes.stop()
            raise
        processes.remove_directory()
        return client

    def wait_connected(self) -> None:
        """Returns when the engine core has answered: both directions are open."""
        self.receive()

    def send(self, message: AddRequest | AbortRequests) -> None:
        self._push.send(encode(message))

    def receive(self) -> EngineOutputs:
        while True:
            news = self.receive_now()
            if news is not None:
                return news
            self._poller.poll()
            if not int(self._pull.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self.check_alive()

    def receive_now(self) -> EngineOutputs | None:
        """The next message that has arrived, or None."""
        try:
            return decode_outputs(self._pull.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def fileno(self) -> int:
        """Becomes readable when news arrives, but only once: then ``receive_now`` until None."""
        return int(self._pull.getsockopt(zmq.FD))

    def death_fds(self) -> list[int]:
        """One of these becomes readable when a process of the engine dies."""
        if self._processes is None:
            return []
        return [child.channel.fileno() for child in self._processes.children]

    def death_reason(self) -> str | None:
        """Why the engine is gone; None while it lives, or if another watches its processes."""
        return None if self._processes is None else self._processes.death_reason()

    def check_alive(self) -> None:
        reason = self.death_reason()
        if reason is not None:
            raise EngineDeadError(reason)

    def close(self) -> None:
        self._close()


def _close(
    owner_pid: int,
    processes: EngineProcesses | None,
    context: "zmq.Context[zmq.Socket[bytes]]",
    sockets: "tuple[zmq.Socket[bytes], ...]",
) -> None:
    if os.getpid() != owner_pid:
        return  # a fork's copy: the engine is its parent's
    for socket in sockets:
        socket.close()
    context.term()
    if processes is not None:
        processes.stop()
