"""How a front end reaches its engine core: in this process, or over ZeroMQ in another one."""

import tempfile
from collections.abc import Callable
from pathlib import Path
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
    ToEngineCore,
    decode_outputs,
    encode,
)
from vllm_lite.model_config import ModelConfig
from vllm_lite.model_files import ModelFiles
from vllm_lite.tokenizer import Tokenizer


class CoreClient(Protocol):
    client_id: int

    def send(self, message: ToEngineCore) -> None: ...
    def receive(self) -> EngineOutputs:
        """Blocks until there is news. Raises EngineDeadError if none can come any more."""
    def close(self) -> None: ...


def make_core(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    num_clients: int,
) -> _core.EngineCore:
    table = tokenizer.token_table()
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
        tokens=_core.make_token_table(
            table.bytes, table.offsets.tobytes(), table.kinds.tobytes(), table.decoding
        ),
    )


def deliver(core: _core.EngineCore, message: ToEngineCore) -> None:
    """Hands one message to the engine core."""
    if isinstance(message, AddRequest):
        core.submit(**msgspec.structs.asdict(message))
    else:
        for key in message.keys:
            core.abort(key)


class InProcessClient:
    """Engine core and worker as objects of this process; ``receive`` runs one step."""

    client_id = 0

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedConfig,
        files: ModelFiles,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        from vllm_lite.worker.worker import Worker  # imports torch, which other front ends do without

        self._core = make_core(config, resolved, model_config, tokenizer, num_clients=1)
        self._worker = Worker(config, resolved, files, model_config, progress)

    def send(self, message: ToEngineCore) -> None:
        deliver(self._core, message)

    def receive(self) -> EngineOutputs:
        while True:
            plan = self._core.begin_step()
            if plan is not None:
                self._run(plan)
            news = self._core.take_outputs(self.client_id)
            if news is not None:
                return decode_outputs(news)
            if plan is None:
                raise EngineDeadError("the engine has nothing to do, but requests are unfinished")

    def _run(self, plan: memoryview) -> None:
        try:
            result = self._worker.execute(plan)
        except Exception as error:
            self._core.fail_step(f"{type(error).__name__}: {error}")
        except BaseException:
            # KeyboardInterrupt: the step's tokens are lost, so its requests are; then let it through.
            self._core.fail_step("interrupted")
            raise
        else:
            self._core.finish_step(result)

    def close(self) -> None:
        self._core.stop()
        del self._core, self._worker


class ProcessClient:
    """An engine core in another process: requests pushed to its address, news pulled from ours."""

    def __init__(
        self,
        engine_address: str,
        own_address: str,
        client_id: int = 0,
        on_close: Callable[[], None] | None = None,
        death_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.client_id = client_id
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self.pull = self._context.socket(zmq.PULL)
        for socket in (self._push, self.pull):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self.pull.bind(own_address)
        self._push.connect(engine_address)
        self._on_close = on_close
        self._death_reason = death_reason

    @classmethod
    def start(
        cls, config: EngineConfig, progress: Callable[[int, int], None] | None = None
    ) -> "ProcessClient":
        """Starts an engine core and a worker for this client alone and waits until they are ready."""
        from vllm_lite.processes import EngineProcesses

        directory = tempfile.TemporaryDirectory(prefix="vllm_lite-")
        own_address = f"ipc://{Path(directory.name) / 'client-0'}"
        try:
            processes = EngineProcesses(config, Path(directory.name), [own_address])
        except BaseException:
            directory.cleanup()
            raise

        def stop() -> None:
            processes.stop()
            directory.cleanup()

        try:
            client = cls(processes.address, own_address, 0, stop, processes.death_reason)
            processes.wait_ready(progress)
        except BaseException:
            stop()
            raise
        processes.watch()
        return client

    def send(self, message: AddRequest | AbortRequests) -> None:
        self._push.send(encode(message))

    def receive(self) -> EngineOutputs:
        while True:
            # Wakes now and then only to see whether the engine is still alive.
            if self.pull.poll(500):
                return decode_outputs(self.pull.recv())
            self.check_alive()

    def receive_now(self) -> EngineOutputs | None:
        """What has already arrived, or None."""
        try:
            return decode_outputs(self.pull.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def check_alive(self) -> None:
        reason = self._death_reason()
        if reason is not None:
            raise EngineDeadError(reason)

    def close(self) -> None:
        self._push.close()
        self.pull.close()
        self._context.term()
        if self._on_close is not None:
            self._on_close()
