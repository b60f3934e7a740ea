"""The engine core's process: ZeroMQ in and out around the C++ loop. Imports no torch.

Three threads, all of them asleep while there is nothing to do: this one receives requests, one runs the C++ loop (without
the interpreter's lock), one sends what it gives.
"""

import os
import threading
import traceback

import msgspec
import zmq

from vllm_lite.channel import Channel, connect_to_parent
from vllm_lite.clients import deliver, make_core
from vllm_lite.config import EngineConfig
from vllm_lite.messages import decode_to_engine_core
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import find_model
from vllm_lite.tokenizer import load_tokenizer


def main() -> None:
    channel = connect_to_parent()
    try:
        serve(channel)
    except Exception as error:
        traceback.print_exc()
        channel.send({"event": "error", "message": str(error)})
        os._exit(1)


def serve(channel: Channel) -> None:
    options = channel.receive()
    config = msgspec.convert(options["config"], EngineConfig)
    files = find_model(config.model)
    model_config = load_model_config(files)
    addresses = options["client_addresses"]
    core = make_core(
        config, config.resolve(model_config), model_config, load_tokenizer(files), len(addresses)
    )
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.setsockopt(zmq.RCVHWM, 0)
    pull.bind(options["address"])
    pushes = []
    for address in addresses:
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, 0)
        push.connect(address)
        pushes.append(push)

    def send_outputs() -> None:
        while messages := core.wait_outputs():
            for client, message in messages:
                pushes[client].send(message)

    sender = threading.Thread(target=send_outputs, name="outbox", daemon=True)

    def run() -> None:
        try:
            core.run(options["plan_fd"], options["result_fd"], int(config.step_timeout * 1000))
        except Exception as error:
            # Every request has been answered with the error: let that out before the process ends.
            core.stop()
            sender.join(timeout=5)
            for push in pushes:
                push.close(linger=1000)
            channel.send({"event": "error", "message": str(error)})
            os._exit(1)

    sender.start()
    threading.Thread(target=run, name="engine-loop", daemon=True).start()
    channel.send({"event": "ready"})
    while True:
        deliver(core, decode_to_engine_core(pull.recv()))


if __name__ == "__main__":
    main()
