"""A process that serves the fake engine: prints its port, and "drained" when it ends in order."""

import sys

from server.fakes import FakeEngine, Script
from vllm_lite.server.listener import bind
from vllm_lite.server.options import ServerOptions
from vllm_lite.server.run import run, serve


def main(delay: float, grace: float) -> None:
    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    engine = FakeEngine(Script("abcdefghij", delay=delay))
    run(serve(engine, [listener], ServerOptions(shutdown_grace=grace)))
    assert engine.drained and engine.running == 0
    print("drained", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
