"""``vllm-lite bench``: the figures of a machine, each beside what bounds it."""

import json
import sys
from importlib import import_module
from typing import Any

from vllm_lite.settings import Parser

_BENCHMARKS = {
    "throughput": "many prompts at once in this process: tokens/s",
    "latency": "one batch, several times: seconds",
    "serve": "load on a running server: TTFT, ITL, tokens/s",
    "startup": "a server's seconds until ready, idle CPU and memory",
}


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    if argv and argv[0] in _BENCHMARKS:
        module = import_module(f"vllm_lite.bench.{argv[0]}")
        try:
            return int(module.main(argv[1:]))
        except (ValueError, OSError) as error:
            print(f"vllm-lite bench {argv[0]}: {error}", file=sys.stderr)
            return 1
    lines = "".join(f"  {name:<12} {what}\n" for name, what in _BENCHMARKS.items())
    usage = f"usage: vllm-lite bench BENCHMARK [options]\n\n{lines}"
    if argv in ([], ["--help"], ["-h"]):
        print(usage, end="")
        return 0
    print(f"vllm-lite bench: unknown benchmark {argv[0]!r}\n\n{usage}", end="", file=sys.stderr)
    return 2


def add_output(parser: Parser) -> None:
    parser.add_argument("--output-json", metavar="FILE",
                        help="write the figures there, too; -: in place of the text")  # fmt: skip


def report(figures: dict[str, Any], text: str, path: str | None) -> None:
    """Prints ``text``, and writes the figures where ``--output-json`` says."""
    if path == "-":
        print(json.dumps(figures))
        return
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(figures, indent=2) + "\n")
    print(text)
