"""The API server's process: HTTP in front, an engine core in another process behind. Imports no
torch.
"""

import asyncio
import socket
from pathlib import Path
from typing import cast

import msgspec

from vllm_lite import _core
from vllm_lite.async_engine import AsyncLLMEngine
from vllm_lite.channel import Channel, ChannelClosed, run_child
from vllm_lite.clients import ProcessClient
from vllm_lite.config import EngineConfig
from vllm_lite.model_files import ModelFiles
from vllm_lite.server.engine import EngineLike
from vllm_lite.server.options import ServerOptions
from vllm_lite.server.run import run, serve, settle_garbage


def main(channel: Channel) -> None:
    options = channel.receive()
    listener = socket.socket(fileno=options["socket_fd"])
    client = ProcessClient(options["engine_address"], options["own_address"])
    config = msgspec.convert(options["config"], EngineConfig)
    engine = AsyncLLMEngine.over(client, config, ModelFiles(Path(options["model_path"])))
    _core.trim_heap()  # of what reading the tokenizer took
    server_options = msgspec.convert(options["options"], ServerOptions)
    client.wait_connected()
    channel.send({"event": "ready"})
    while channel.receive()["event"] != "start":
        pass
    settle_garbage()
    run(_serve(engine, listener, server_options, channel))


async def _serve(
    engine: AsyncLLMEngine, listener: socket.socket, options: ServerOptions, channel: Channel
) -> None:
    # The socket has been listening since the parent bound it: connections wait in its queue.
    loop = asyncio.get_running_loop()

    def hear() -> None:
        """The parent speaks only once more: when the engine is gone."""
        loop.remove_reader(channel.fileno())
        try:
            message = channel.receive()
        except ChannelClosed:
            return
        engine.declare_dead(str(message["reason"]))

    loop.add_reader(channel.fileno(), hear)
    if channel.pending():
        hear()
    try:
        # The engine's config has a number as max_model_len, which the type of the option leaves
        # open.
        await serve(cast(EngineLike, engine), [listener], options)
    finally:
        loop.remove_reader(channel.fileno())
        engine.close()


if __name__ == "__main__":
    run_child("API server", main)
