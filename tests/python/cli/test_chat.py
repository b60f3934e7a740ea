"""``chat`` and ``complete``: with a server, with a model, typed, piped, and interrupted."""

import errno
import io
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from server.client import LiveServer
from server.fakes import FakeEngine, Script
from vllm_lite.commands import chat, complete
from vllm_lite.errors import EngineError
from vllm_lite.server.options import ServerOptions
from waiting import wait_until

FIGURES = re.compile(r"\[(\d+) tokens, [\d.]+ tokens/s, first after [\d.]+ s(, stopped)?\]\n")


@pytest.fixture
def live() -> Iterator[LiveServer]:
    server = LiveServer(FakeEngine(Script(delay=0.002)), ServerOptions(api_keys=("secret",)))
    yield server
    server.close()


def at_server(live: LiveServer, *arguments: str) -> list[str]:
    return ["--url", live.url, "--api-key", "secret", *arguments]


class Terminal(io.StringIO):
    """Lines that somebody types; then Ctrl-D."""

    def isatty(self) -> bool:
        return True


def conversation(live: LiveServer) -> list[tuple[str, str]]:
    """The messages of the last request."""
    return [(m["role"], m["content"]) for m in live.engine.tokenizer.chats[-1]["messages"]]


def test_one_question(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = at_server(live, "-q", "Hi?", "--system", "Be brief.", "--max-tokens", "50")
    assert chat.main([*arguments, "--temperature", "0.5", "--seed", "3", "--top-p", "0.9"]) == 0
    said = capsys.readouterr()
    assert said.out == "Hello, world\n"
    assert FIGURES.fullmatch(said.err) and said.err.startswith("[12 tokens, ")
    assert conversation(live) == [("system", "Be brief."), ("user", "Hi?")]
    params = live.engine.calls[-1].params
    assert (params.max_tokens, params.temperature, params.seed, params.top_p) == (50, 0.5, 3, 0.9)


def test_the_servers_defaults_hold_without_options(live: LiveServer) -> None:
    live.engine.model_config.generation_defaults = {"temperature": 0.3}
    assert chat.main(at_server(live, "-q", "Hi?")) == 0
    assert live.engine.calls[-1].params.temperature == 0.3


def test_piped_text_is_the_question(
    live: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert chat.main(at_server(live)) == 0
    assert conversation(live) == [("user", "two\nlines\n")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once"))
    assert complete.main(at_server(live, "--model", "alias")) == 0
    assert bytes(live.engine.calls[-1].prompt) == b"Once"
    assert live.engine.calls[-1].params.max_tokens == 128  # the server's own default is 16
    assert capsys.readouterr().out == "Hello, world\n" * 2


def test_nothing_piped_is_nothing_to_answer(
    live: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for stdin in (io.StringIO(""), None):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert chat.main(at_server(live)) == 1
        assert "nothing to answer" in capsys.readouterr().err
    assert live.engine.calls == []


def test_a_terminal_of_few_characters_and_bytes_that_are_no_text(
    live: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live.engine.script = Script("né")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", narrow)
        assert complete.main(at_server(live, "-q", "a", "--max-tokens", "9")) == 0
    assert narrow.buffer.getvalue() == b"n?\n"  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert complete.main(at_server(live)) == 1
    assert "not UTF-8" in capsys.readouterr().err
    assert chat.main(at_server(live, "-q", "a", "--temperature", "nan")) == 1
    assert "finite" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_an_error(
    live: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        assert complete.main(at_server(live, "-q", "a")) == 1
    assert "No space left" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert complete.main(at_server(live, "-q", "a")) == 1
    assert "standard output is closed" in capsys.readouterr().err


def test_typed_conversation_goes_on_after_an_error(
    live: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["one", "", "bad", "two"])

    def typed(_: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        failing = Script(error_at=2, error=EngineError("the worker died"))
        live.engine.script = failing if line == "bad" else Script(delay=0.002)
        return line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    assert chat.main(at_server(live)) == 0
    assert "vllm-lite chat: the worker died" in capsys.readouterr().err
    # The question that failed is not part of the conversation.
    assert conversation(live) == [
        ("user", "one"), ("assistant", "Hello, world"), ("user", "two")
    ]  # fmt: skip


class Screen(io.StringIO):
    """Calls ``seen`` with all the text there is whenever some is written."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        super().__init__()
        self._seen = seen

    def write(self, text: str) -> int:
        length = super().write(text)
        self._seen(self.getvalue())
        return length


def interrupt_reading() -> None:
    """Ctrl-C when the main thread reads from a socket, to which nothing comes."""
    main = threading.main_thread().ident
    assert main is not None
    wait_until(lambda: sys._current_frames()[main].f_code is socket.SocketIO.readinto.__code__)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_the_answer_and_not_the_program(
    live: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live.engine.script = Script("tick ", held_at=12, ends=False)
    questions = iter(["long", KeyboardInterrupt(), "next"])

    def typed(_: str) -> str:
        question = next(questions, EOFError())
        if isinstance(question, BaseException):
            raise question
        if question == "next":
            live.engine.script = Script("done")
        return question

    def interrupt(text: str) -> None:
        if text == "tick tick ti":
            threading.Thread(target=interrupt_reading).start()

    screen = Screen(interrupt)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("builtins.input", typed)
    assert chat.main(at_server(live)) == 0
    assert ", stopped]" in capsys.readouterr().err
    out = screen.getvalue()
    assert out.startswith("tick tick ti") and out.endswith("  (Ctrl-D ends)\ndone\n\n")
    (_, first), (_, partial), (_, second) = conversation(live)
    assert (first, second) == ("long", "next") and partial == "tick tick ti"
    wait_until(lambda: live.engine.running == 0)  # the server has ended it, too
    assert len(live.engine.aborted) == 1


def test_text_comes_as_it_is_made(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character is made when the one before it has been seen."""
    live.engine.script = Script("0123456789", held_at=1)

    def let_go(text: str) -> None:
        live.engine.script.held_at = len(text) + 1

    screen = Screen(let_go)
    monkeypatch.setattr(sys, "stdout", screen)
    assert chat.main(at_server(live, "-q", "count")) == 0
    assert screen.getvalue() == "0123456789\n"


def test_what_a_model_writes_cannot_steer_the_terminal(
    live: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    live.engine.script = Script("a\x1b[2Jb\x07\tc\nd\r\x9b")
    assert chat.main(at_server(live, "-q", "x")) == 0
    assert capsys.readouterr().out == "a[2Jb\tc\nd\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "no answer from http://127.0.0.1:1"),
        (["--url", "ftp://x"], "url: must begin with http:// or https://"),
        (["--max-num-seqs", "4"], "max_num_seqs is the server's; here it needs a MODEL"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_what_cannot_work_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat.main(["-q", "x", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_refusals_of_the_server_are_shown(
    live: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat.main(["--url", live.url, "--api-key", "wrong", "-q", "x"]) == 1
    assert "vllm-lite chat: 401: a valid API key is needed" in capsys.readouterr().err
    assert chat.main(at_server(live, "-q", "x", "--model", "other")) == 1
    assert "404: model: 'other' is not served here" in capsys.readouterr().err
    assert complete.main(at_server(live, "-q", "x", "--temperature", "9")) == 1
    assert "400: temperature" in capsys.readouterr().err


def test_key_from_the_environment(
    live: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LITE_API_KEY", "secret")
    assert chat.main(["--url", live.url + "/v1", "-q", "x"]) == 0
    assert capsys.readouterr().out == "Hello, world\n"


def test_model_in_this_process(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [tiny_model, "--threads", "1", "--max-model-len", "256", "--max-tokens", "8"]
    assert complete.main([*options, "-q", "The quick", "--temperature", "0"]) == 0
    assert re.search(r"\[\d+ tokens.*first after", capsys.readouterr().err)
    assert chat.main([*options, "-q", "The quick", "--temperature", "-1"]) == 1
    assert "temperature" in capsys.readouterr().err
    assert chat.main([*options, "-q", "word " * 400]) == 1
    assert "max_model_len" in capsys.readouterr().err
