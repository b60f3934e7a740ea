"""A process that serves the fake engine: prints its port, and "drained" when it ends in order.

Every request gets one token, and the others when a line has come on standard input.
"""

import sys
import threading

from server.fakes import FakeEngine, Script
from vllm_lite.server.listener import bind
from vllm_lite.server.options import ServerOptions
from vllm_lite.server.run import run, serve


def main(grace: float) -> None:
    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    engine = FakeEngine(Script("abcdefghij", held_at=1))

    def let_go() -> None:
        if sys.stdin.readline():
            engine.script.held_at = None

    threading.Thread(target=let_go, daemon=True).start()
    run(serve(engine, [listener], ServerOptions(shutdown_grace=grace)))
    assert engine.drained and engine.running == 0
    print("drained", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
