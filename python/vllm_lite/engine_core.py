"""The engine core's process: ZeroMQ in and out around the C++ loop. Imports no torch.

Three threads, all of them asleep while there is nothing to do: this one receives requests, one runs
the C++ loop (without the interpreter's lock), one sends what it gives.
"""

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from vllm_lite import _core
from vllm_lite.channel import Channel, report_failure, run_child
from vllm_lite.clients import deliver, make_core
from vllm_lite.config import EngineConfig
from vllm_lite.messages import CoreStats, EngineOutputs, Hello, decode_to_engine_core, encode
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles
from vllm_lite.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_LAST_WORDS_MS = 1000


def serve(channel: Channel) -> None:
    options = channel.receive()
    config = msgspec.convert(options["config"], EngineConfig)
    files = ModelFiles(Path(options["model_path"]))
    model_config = load_model_config(files)
    addresses: list[str] = options["client_addresses"]
    table = load_tokenizer(files).token_table()  # all that this process wants of a tokenizer
    resolved = config.resolve(model_config)
    if resolved.num_blocks is None:
        config.kv_cache_memory = channel.receive()["bytes"]
        resolved = config.resolve(model_config)
    core = make_core(
        config,
        resolved,
        model_config,
        table,
        len(addresses),
        resolved.async_scheduling,
    )
    del table
    _core.trim_heap()  # of what reading the tokenizer took
    context = zmq.Context()
    pull = _socket(context, zmq.PULL)
    pull.bind(options["address"])
    pushes = [_socket(context, zmq.PUSH) for _ in addresses]
    for push, address in zip(pushes, addresses, strict=True):
        push.connect(address)
    _meet_clients(core, pull, pushes)

    def send_outputs() -> None:
        try:
            while messages := core.wait_outputs():
                for client, message in messages:
                    pushes[client].send(message)
        except Exception as error:
            # Without this thread nobody would hear anything any more.
            logger.exception("the engine core cannot send")
            report_failure(channel, error)
            os._exit(1)

    def run() -> None:
        try:
            core.run(options["plan_fd"], options["result_fd"], int(config.step_timeout * 1000))
        except Exception as error:
            logger.error("%s", error)
            # Every request has been answered with the error: let that out before the process ends.
            core.stop()
            sender.join(timeout=5)
            for push in pushes:
                push.close(linger=_LAST_WORDS_MS)
            context.term()  # wakes the receiving thread, and returns when all has been sent
            report_failure(channel, error)
            os._exit(1)

    sender = threading.Thread(target=send_outputs, name="outbox", daemon=True)
    loop = threading.Thread(target=run, name="engine-loop", daemon=True)
    sender.start()
    loop.start()
    channel.send({"event": "ready"})
    with pull, suppress(zmq.ContextTerminated):
        while True:
            deliver(core, decode_to_engine_core(pull.recv()))
    loop.join()


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    # The engine core bounds what waits; a message is never dropped or held up on the way.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def _meet_clients(
    core: _core.EngineCore, pull: "zmq.Socket[bytes]", pushes: "list[zmq.Socket[bytes]]"
) -> None:
    """Waits for every client's hello and answers it."""
    strangers = set(range(len(pushes)))
    while strangers:
        message = decode_to_engine_core(pull.recv())
        if isinstance(message, Hello):
            pushes[message.client_id].send(encode(EngineOutputs([], CoreStats())))
            strangers.discard(message.client_id)
        else:
            deliver(core, message)


if __name__ == "__main__":
    run_child("engine core", serve)
