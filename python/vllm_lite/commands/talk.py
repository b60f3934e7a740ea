"""What ``chat`` and ``complete`` share: options, and answers that are shown as they come."""

import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from vllm_lite.arguments import add_engine_options, engine_config
from vllm_lite.commands.sources import AnswerError, Local, Message, Server, Source
from vllm_lite.config import EngineConfig
from vllm_lite.settings import Parser, add_config, add_to, read

# What a model writes may not move the cursor or change the terminal's state.
_CONTROLS = {code: None for code in [*range(32), 127, *range(128, 160)] if chr(code) not in "\n\t"}
_SAMPLING = ("max_tokens", "temperature", "top_p", "seed")


def make_parser(
    prog: str, description: str, question: str, max_tokens: int | None = None
) -> Parser:
    """``question``: what ``-q`` is called and takes. ``max_tokens`` None: as many as fit."""
    only_flags = ("load", "question", "url", "model", "system", *_SAMPLING)
    parser = Parser(prog, description, "[MODEL]", only_flags)
    parser.add_argument("load", nargs="?", metavar="MODEL",
                        help="a model to load into this process, in place of a server")  # fmt: skip
    parser.add_argument("-q", f"--{question}", dest="question", metavar="TEXT",
                        help="answer this and exit; without it, what a pipe brings is answered, or "
                        "what is typed")  # fmt: skip
    add_config(parser)
    add = add_to(parser, "server", None)
    add("--url", "of a running server", "--base-url", default="http://127.0.0.1:8000")
    add("--model", "name to ask for (default: the server's first)", metavar="NAME")
    add("--api-key", "that the server asks for", metavar="KEY")
    add = add_to(parser, "answers", None)
    fitting = "" if max_tokens else " (default: as many as fit)"
    add("--max-tokens", f"of an answer{fitting}", type=int, default=max_tokens, metavar="N")
    add("--temperature", "0: always the likeliest token (default: the model's)", type=float,
        metavar="T")  # fmt: skip
    add("--top-p", "(default: the model's)", type=float, metavar="P")
    add("--seed", "for the same answers again", type=int, metavar="N")
    return parser


def run(
    parser: Parser,
    argv: list[str],
    talk: Callable[[Source, dict[str, Any], dict[str, Any]], int],
) -> int:
    """Makes the source that the options ask for; returns the exit code, which is that of
    ``talk(source, all options, sampling options)``.
    """
    add_engine_options(parser)
    if sys.stderr is None:  # print() would take standard output in its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print(f"{parser.prog}: standard output is closed", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may know few characters
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is no text is refused where it is sent
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        settings = read(parser, argv)
        values = settings.values
        source: Source
        if values["load"] is None:
            for name in EngineConfig.__struct_fields__:
                if settings.sources.get(name) == "flag" and name != "model":
                    raise ValueError(f"{name} is the server's; here it needs a MODEL to load")
        if values["load"] is not None:
            source = Local(engine_config({**values, "model": values["load"]}))
        else:
            source = Server(values["url"], values["model"], values["api_key"])
    except (ValueError, OSError, AnswerError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    with closing(source):
        sampling = {name: values[name] for name in _SAMPLING if values[name] is not None}
        return talk(source, values, sampling)


def show(source: Source, prompt: str | list[Message], options: dict[str, Any]) -> str:
    """Prints an answer as it comes and, on standard error, how fast it came; returns its text.

    Ctrl-C ends the answer: what has come is returned. Raises ``AnswerError``.
    """
    start = time.perf_counter()
    first = last = None
    num_first = num_tokens = 0
    text, stopped = "", False
    pieces = source.answer(prompt, options)
    try:
        for piece in pieces:
            if piece.text:
                last = time.perf_counter()
                if first is None:
                    first, num_first = last, piece.num_tokens or 0
                text += piece.text
                sys.stdout.write(piece.text.translate(_CONTROLS))
                sys.stdout.flush()
            num_tokens = piece.num_tokens or num_tokens
    except KeyboardInterrupt:
        stopped = True
    except OSError as error:
        raise AnswerError(f"standard output: {error.strerror}") from None
    finally:
        pieces.close()  # type: ignore[attr-defined]
        if text and not text.endswith("\n"):
            with suppress(OSError):
                sys.stdout.write("\n")
                sys.stdout.flush()
    figures = [f"{num_tokens} tokens"]
    if first is not None and last is not None:
        if num_tokens > num_first and last > first:
            figures.append(f"{(num_tokens - num_first) / (last - first):.1f} tokens/s")
        figures.append(f"first after {first - start:.2f} s")
    if stopped:
        figures.append("stopped")
    print(f"[{', '.join(figures)}]", file=sys.stderr)
    return text


def converse(prog: str, question: str | None, answer: Callable[[str], object]) -> int:
    """``answer`` to the question, or to what a pipe or a file brings on standard input, or to each
    line that is typed; returns the exit code.
    """

    def try_to_answer(text: str) -> int:
        try:
            answer(text)
        except AnswerError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            return 1
        return 0

    if question is None and (sys.stdin is None or not sys.stdin.isatty()):
        question = sys.stdin.read() if sys.stdin is not None else ""
    if question is not None:
        if not question:
            print(f"{prog}: nothing to answer: standard input is empty", file=sys.stderr)
            return 1
        return try_to_answer(question)
    with suppress(ImportError):  # Python may have been built without it
        import readline  # noqa: F401  # input() then edits lines and has a history
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("  (Ctrl-D ends)")
            continue
        if line.strip():
            try_to_answer(line)
