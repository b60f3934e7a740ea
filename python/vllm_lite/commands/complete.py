"""``vllm-lite complete``: a model goes on with a text."""

from typing import Any

from vllm_lite.commands.sources import Source
from vllm_lite.commands.talk import converse, make_parser, run, show

_MAX_TOKENS = 128  # a raw prompt has no end of its own


def main(argv: list[str]) -> int:
    parser = make_parser(
        "vllm-lite complete",
        "Let a running server, or a MODEL that is loaded here, go on with a text. Ctrl-C stops it, "
        "Ctrl-D ends.",
        "prompt",
        max_tokens=_MAX_TOKENS,
    )
    return run(parser, argv, _talk)


def _talk(source: Source, values: dict[str, Any], options: dict[str, Any]) -> int:
    def go_on(prompt: str) -> None:
        show(source, prompt, options)

    return converse("vllm-lite complete", values["question"], go_on)
