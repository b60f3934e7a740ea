"""The worker's process: takes plans from one ring and puts results into the other."""

from pathlib import Path

import msgspec

from vllm_lite import _core
from vllm_lite.channel import Channel, run_child
from vllm_lite.config import EngineConfig
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles

# The ring takes a time limit; the process ends by itself when its parent does.
_FOREVER_MS = 1 << 40


def serve(channel: Channel) -> None:
    options = channel.receive()

    from vllm_lite.worker.worker import BegunStep, Worker

    config = msgspec.convert(options["config"], EngineConfig)
    plans = _core.ShmRing(options["plan_fd"])
    results = _core.ShmRing(options["result_fd"])
    files = ModelFiles(Path(options["model_path"]))
    model_config = load_model_config(files)

    def report(done: int, total: int) -> None:
        channel.send({"event": "progress", "done": done, "total": total})

    resolved = config.resolve(model_config)
    worker = Worker(config, resolved, files, model_config, report)
    worker.pin_threads()
    if resolved.num_blocks is None:
        channel.send({"event": "kv_cache_memory", "bytes": worker.kv_cache_memory})
    channel.send({"event": "ready"})
    step_timeout = int(config.step_timeout * 1000)

    def push(result: bytes) -> None:
        if not results.push(result, step_timeout):
            raise RuntimeError("the engine core takes no results any more")

    unanswered: BegunStep | None = None
    while True:
        # A step is begun before the one before is answered, if its plan is there already.
        plan = plans.peek(_FOREVER_MS if unanswered is None else 0)
        begun: BegunStep | None = None
        if plan is not None:
            begun = worker.begin(plan)
            plan.release()
            plans.release()
        if unanswered is not None:
            push(unanswered.answer())
            unanswered = None
        if begun is not None and begun.is_pending:
            unanswered = begun
        elif begun is not None:
            push(begun.answer())


if __name__ == "__main__":
    run_child("worker", serve)
