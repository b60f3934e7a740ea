"""The worker's process: takes plans from one ring and puts results into the other."""

import logging
from pathlib import Path

import msgspec

from vllm_lite import _core
from vllm_lite.channel import Channel, run_child
from vllm_lite.config import EngineConfig
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles

logger = logging.getLogger("vllm_lite.worker")

# The ring takes a time limit; the process ends by itself when its parent does.
_FOREVER_MS = 1 << 40


def serve(channel: Channel) -> None:
    options = channel.receive()

    from vllm_lite.worker.step_plan import encode_error, step_words_of
    from vllm_lite.worker.worker import Worker

    config = msgspec.convert(options["config"], EngineConfig)
    plans = _core.ShmRing(options["plan_fd"])
    results = _core.ShmRing(options["result_fd"])
    files = ModelFiles(Path(options["model_path"]))
    model_config = load_model_config(files)

    def report(done: int, total: int) -> None:
        channel.send({"event": "progress", "done": done, "total": total})

    worker = Worker(config, config.resolve(model_config), files, model_config, report)
    channel.send({"event": "ready"})
    step_timeout = int(config.step_timeout * 1000)
    while True:
        plan = plans.peek(_FOREVER_MS)
        if plan is None:
            continue
        try:
            result = worker.execute(plan)
        except Exception as error:
            logger.exception("a step failed")
            result = encode_error(step_words_of(plan), f"{type(error).__name__}: {error}")
        finally:
            plan.release()
            plans.release()
        if not results.push(result, step_timeout):
            raise RuntimeError("the engine core takes no results any more")


if __name__ == "__main__":
    run_child("worker", serve)
