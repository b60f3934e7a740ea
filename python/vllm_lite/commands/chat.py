"""``vllm-lite chat``: a conversation in the terminal."""

from typing import Any

from vllm_lite.commands.sources import AnswerError, Message, Source
from vllm_lite.commands.talk import converse, make_parser, run, show


def main(argv: list[str]) -> int:
    parser = make_parser(
        "vllm-lite chat",
        "Talk to a running server, or to a MODEL that is loaded here. Ctrl-C stops an answer, "
        "Ctrl-D ends.",
        "question",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    return run(parser, argv, _talk)


def _talk(source: Source, values: dict[str, Any], options: dict[str, Any]) -> int:
    messages: list[Message] = []
    if values["system"] is not None:
        messages.append({"role": "system", "content": values["system"]})

    def ask(question: str) -> None:
        messages.append({"role": "user", "content": question})
        try:
            text = show(source, messages, options)
        except AnswerError:
            messages.pop()  # as if it had not been asked
            raise
        messages.append({"role": "assistant", "content": text})

    return converse("vllm-lite chat", values["question"], ask)
