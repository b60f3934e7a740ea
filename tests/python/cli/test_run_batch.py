"""``run-batch``: order, errors of lines, and answers that are the server's own."""

import asyncio
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_lite
from server.client import Client
from server.fakes import FakeEngine, Script
from vllm_lite.commands import run_batch
from vllm_lite.commands.run_batch import Batch
from vllm_lite.errors import QueueFullError
from waiting import PATIENCE

PACKAGE = str(Path(vllm_lite.__file__).parents[1])


class SmallEngine(FakeEngine):
    def __init__(self, script: Script | None = None) -> None:
        super().__init__(script)
        self.config.max_num_seqs = 2  # type: ignore[attr-defined]


def line(custom_id: str, body: Any, url: str = "/v1/completions", **fields: Any) -> str:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}
    )


def answers(engine: FakeEngine, *lines: str) -> list[dict[str, Any]]:
    out = io.BytesIO()
    text = "\n".join(lines).encode("utf-8", "surrogateescape")
    done, failed = asyncio.run(Batch(engine).run(io.BytesIO(text), out))
    found = [json.loads(entry) for entry in out.getvalue().splitlines()]
    assert done == len(found)
    bad = [e for e in found if e["error"] or e["response"]["status_code"] != 200]
    assert failed == len(bad)
    assert len({entry["id"] for entry in found}) == len(found)
    return found


def test_answers_are_the_servers_and_keep_the_order() -> None:
    engine = SmallEngine(Script("abcdefghij", ends=False))
    bodies = [{"prompt": "x", "max_tokens": 40 - index} for index in range(30)]
    found = answers(engine, *(line(f"r{i}", body) for i, body in enumerate(bodies)))
    assert [entry["custom_id"] for entry in found] == [f"r{i}" for i in range(30)]
    client = Client(SmallEngine(Script("abcdefghij", ends=False)))
    for entry, body in zip(found, bodies, strict=True):
        assert entry["error"] is None and entry["response"]["status_code"] == 200
        assert entry["response"]["request_id"]
        made, expected = entry["response"]["body"], client.post("/v1/completions", json=body).json()
        assert {**made, "id": "", "created": 0} == {**expected, "id": "", "created": 0}
    chat = line("c", {"messages": [{"role": "user", "content": "Hi"}]}, "/v1/chat/completions")
    body = answers(SmallEngine(), chat)[0]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "Hello, world"


def test_a_mark_at_the_beginning_of_the_file_is_no_part_of_its_first_line() -> None:
    (found,) = answers(SmallEngine(), "\ufeff" + line("a", {"prompt": "x"}))
    assert found["custom_id"] == "a" and found["response"]["status_code"] == 200


def test_errors_of_requests_are_the_servers() -> None:
    found = answers(
        SmallEngine(),
        line("a", {"prompt": "x", "temperature": 9}),
        line("b", {"prompt": "x"}, "/v1/nothing"),
        line("c", {"prompt": "x"}, "/health"),
        line("d", {"prompt": "x", "model": "other"}),
        line("e", {"prompt": "x"}),
        line("f", [1]),
    )
    client = Client(SmallEngine())
    expected = [
        client.complete(prompt="x", temperature=9),
        client.post("/v1/nothing", json={}),
        client.post("/health", json={}),
        client.complete(model="other"),
        client.complete(prompt="x"),
        client.post("/v1/completions", json=[1]),
    ]
    assert [entry["response"]["status_code"] for entry in found] == [
        answer.status_code for answer in expected
    ]
    assert [entry["response"]["status_code"] for entry in found] == [400, 404, 405, 404, 200, 400]
    for entry, answer in zip(found, expected, strict=True):
        if answer.status_code != 200:
            assert entry["response"]["body"] == answer.json()


@pytest.mark.parametrize(
    ("text", "custom_id", "message"),
    [
        ("{", None, "truncated"),
        ("5", None, "Expected `object`"),
        ("[]", None, "Expected `object`"),
        ('{"custom_id": "z"}', "z", "url"),
        ('{"custom_id": 5, "url": "/v1/completions", "body": {}}', None, r"\$\.custom_id"),
        ('{"url": "/v1/completions", "body": {}}', None, "custom_id"),
        (line("z", {"prompt": "a"}, method="GET"), "z", "method: must be POST"),
        (line("z", {"prompt": "a"}, "http://x/v1/completions"), "z", "url: must be a path"),
        (line("z", {"prompt": "a", "stream": True}), "z", "body.stream"),
        (line("first", {"prompt": "a"}), "first", "custom_id: 'first' stands in an earlier line"),
        ("\udcff", None, "."),
        ("[" * 5000, None, "."),
    ],
)
def test_bad_line_gives_an_error_line_and_others_go_on(
    text: str, custom_id: str | None, message: str
) -> None:
    found = answers(
        SmallEngine(), line("first", {"prompt": "x"}), text, "", line("last", {"prompt": "x"})
    )
    assert len(found) == 3
    assert found[0]["response"]["status_code"] == found[2]["response"]["status_code"] == 200
    bad = found[1]
    assert (bad["custom_id"], bad["response"]) == (custom_id, None)
    assert bad["error"]["code"] == "invalid_line"
    assert re.search(message, bad["error"]["message"]), bad


def test_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SmallEngine(Script(start_error=QueueFullError("full")))
    sleep, waits = asyncio.sleep, []

    async def quick(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            engine.script = Script()
        await sleep(0)

    monkeypatch.setattr(run_batch.asyncio, "sleep", quick)
    found = answers(engine, line("a", {"prompt": "x"}))
    assert found[0]["response"]["status_code"] == 200
    assert waits[:3] == [1, 1, 1]


def test_no_more_lines_are_under_way_than_the_window() -> None:
    engine = SmallEngine(Script(held_at=1))
    engine.let_go_at = 8
    answers(engine, *(line(str(i), {"prompt": "x"}) for i in range(40)))
    assert engine.most_running == 8


def test_command_on_a_model(tiny_model: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "The", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    source.write_text("\n".join([line("a", body), "nonsense", line("b", {**body, "n": 2})]))
    command = [sys.executable, "-m", "vllm_lite.cli", "run-batch", "-i", str(source)]
    done = subprocess.run(
        [*command, "-o", str(target), "--model", tiny_model, "--threads", "1"],
        env={"PYTHONPATH": PACKAGE, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "3 requests answered, 1 of them with an error" in done.stderr
    found = [json.loads(entry) for entry in target.read_text().splitlines()]
    assert [entry["custom_id"] for entry in found] == ["a", None, "b"]
    assert found[0]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert len(found[2]["response"]["body"]["choices"]) == 2
    missing = subprocess.run(
        [*command[:-1], str(tmp_path / "none"), "-o", str(target)],
        env={"PYTHONPATH": PACKAGE, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert missing.returncode == 1 and "No such file" in missing.stderr
