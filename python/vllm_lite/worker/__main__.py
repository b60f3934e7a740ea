"""The worker's process: takes plans from one ring and puts results into the other."""

import os
import traceback

import msgspec

from vllm_lite import _core
from vllm_lite.channel import Channel, ChannelClosed, connect_to_parent
from vllm_lite.config import EngineConfig
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import find_model


def main() -> None:
    channel = connect_to_parent()
    try:
        serve(channel)
    except Exception as error:
        traceback.print_exc()
        channel.send({"event": "error", "message": str(error)})
        os._exit(1)


def serve(channel: Channel) -> None:
    from vllm_lite.worker.step_plan import encode_error, step_words_of
    from vllm_lite.worker.worker import Worker

    options = channel.receive()
    config = msgspec.convert(options["config"], EngineConfig)
    plans = _core.ShmRing(options["plan_fd"])
    results = _core.ShmRing(options["result_fd"])
    files = find_model(config.model)
    model_config = load_model_config(files)

    def report(done: int, total: int) -> None:
        channel.send({"event": "progress", "done": done, "total": total})

    worker = Worker(config, config.resolve(model_config), files, model_config, report)
    channel.send({"event": "ready"})
    step_timeout = int(config.step_timeout * 1000)
    while True:
        plan = plans.peek(-1)
        if plan is None:
            continue
        try:
            result = worker.execute(plan)
        except Exception as error:
            traceback.print_exc()
            result = encode_error(step_words_of(plan), f"{type(error).__name__}: {error}")
        finally:
            plan.release()
            plans.release()
        results.push(result, step_timeout)


if __name__ == "__main__":
    try:
        main()
    except (EOFError, ChannelClosed):
        os._exit(0)
