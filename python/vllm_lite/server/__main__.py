"""The API server's process: HTTP in front, an engine core in another process behind. Imports no torch."""

import asyncio
import os
import socket
import traceback
from typing import Any

import msgspec

from vllm_lite.async_engine import AsyncLLMEngine
from vllm_lite.channel import Channel, ChannelClosed, connect_to_parent
from vllm_lite.clients import ProcessClient
from vllm_lite.config import EngineConfig
from vllm_lite.server.options import ServerOptions
from vllm_lite.server.run import run, serve


def main() -> None:
    channel = connect_to_parent()
    try:
        options = channel.receive()
        listener = socket.socket(fileno=options["socket_fd"])
        client = ProcessClient(options["engine_address"], options["own_address"])
        engine = AsyncLLMEngine.over(client, msgspec.convert(options["config"], EngineConfig))
        server_options = msgspec.convert(options["options"], ServerOptions)
        while channel.receive()["event"] != "start":
            pass
        run(_serve(engine, listener, server_options, channel))
    except ChannelClosed:
        os._exit(0)
    except Exception as error:
        traceback.print_exc()
        channel.send({"event": "error", "message": str(error)})
        os._exit(1)


async def _serve(
    engine: AsyncLLMEngine, listener: socket.socket, options: ServerOptions, channel: Channel
) -> None:
    # The socket has been listening since the parent bound it: connections wait in its queue.
    channel.send({"event": "ready"})
    follower = asyncio.create_task(_follow(engine, channel))
    await serve(engine, [listener], options)
    follower.cancel()
    engine.close()


async def _follow(engine: AsyncLLMEngine, channel: Channel) -> None:
    """Hears from the parent that the engine is gone."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(channel.fileno(), readable.set)
    try:
        await readable.wait()
        message: dict[str, Any] = channel.receive()
        if message["event"] == "engine_dead":
            engine.declare_dead(str(message["reason"]))
    finally:
        loop.remove_reader(channel.fileno())


if __name__ == "__main__":
    main()
