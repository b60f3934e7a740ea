"""The command line as a whole: what is quick, what is said, and the benchmarks as commands."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_lite
from processes.server_process import ServerProcess
from server.client import LiveServer
from server.fakes import FakeEngine, Script
from vllm_lite import bench, cli
from vllm_lite.bench import serve as bench_serve
from vllm_lite.commands import collect_env
from vllm_lite.server.options import ServerOptions
from vllm_lite.version import __version__
from waiting import PATIENCE

PACKAGE = str(Path(vllm_lite.__file__).parents[1])
COMMANDS = ("serve", "chat", "complete", "bench", "run-batch", "collect-env")
BENCHMARKS = ("throughput", "latency", "serve", "startup")


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_lite.cli", *arguments],
        env={"PYTHONPATH": PACKAGE, "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vllm-lite", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_version_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['vllm-lite', '--version']\n"
        "from vllm_lite.cli import main; main()\n"
        "heavy = {'torch', 'msgspec', 'yaml', 'zmq', 'fastapi', 'argparse', 'asyncio'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": PACKAGE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"vllm-lite {__version__}\n"), done.stderr


@pytest.mark.parametrize(
    "words", [[name] for name in COMMANDS] + [["bench", name] for name in BENCHMARKS]
)
def test_help_of_every_command_is_short(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words, "--help") == 0
    text = capsys.readouterr().out
    assert f"usage: vllm-lite {' '.join(words)}" in text
    assert len(text.splitlines()) < 140
    assert len(text.partition("\n\n")[0].splitlines()) <= 2  # usage does not list every option
    assert "SUPPRESS" not in text and "None" not in text


def test_unknown_commands_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "srve") == 2
    assert "unknown command 'srve'" in capsys.readouterr().err
    assert run(monkeypatch, "bench", "speed") == 2
    assert "unknown benchmark 'speed'" in capsys.readouterr().err
    assert run(monkeypatch, "bench", "latency", "--batch-size", "0") == 1
    assert "must be an integer of at least 1, got '0'" in capsys.readouterr().err


def test_environment_report_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_env.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for title in ("system", "packages", "cpu", "memory", "container", "torch", "gpu", "build"):
        assert found[title] and "error" not in found[title], found[title]
    assert found["packages"]["msgspec"][0].isdigit()
    assert found["build"]["in use"] in found["build"]["CPU kernels for this machine"]
    assert collect_env.main([]) == 0
    text = capsys.readouterr().out
    assert "memory:\n  MemTotal: " in text


def test_environment_report_hides_keys_and_survives_a_part_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> dict[str, object]:
        raise RuntimeError("no such file")

    monkeypatch.setenv("VLLM_LITE_API_KEY", "hunter2")
    monkeypatch.setattr(collect_env, "_memory", broken)
    monkeypatch.setattr(collect_env, "_torch", dict)
    found = collect_env.collect()
    assert "hunter2" not in json.dumps(found)
    assert found["environment"]["VLLM_LITE_API_KEY"] == "(hidden)"
    assert found["memory"] == {"error": "RuntimeError: no such file"}


def test_throughput_and_latency_count_what_they_asked_for(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    load = ["--input-len", "8", "--output-len", "4", "--threads", "1"]
    wanted = ["throughput", tiny_model, *load, "--num-prompts", "3", "--output-json", str(path)]
    assert bench.main(wanted) == 0
    figures = json.loads(path.read_text())
    # Both are rounded, the seconds to thousandths of which there may be three.
    seconds = 12 / figures["output_tokens_per_s"]
    assert figures["seconds"] == pytest.approx(seconds, abs=0.0006, rel=0.02)
    assert 0 < figures["share_of_bound"] < 2
    assert "3 prompts of 8 tokens, 4 out" in capsys.readouterr().out
    wanted = ["latency", tiny_model, *load, "--batch-size", "2", "--num-iters", "3"]
    assert bench.main([*wanted, "--output-json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["latencies_s"]) == 3
    assert figures["min_s"] <= figures["median_s"] <= figures["max_s"]


def test_serving_benchmark_keeps_its_limits_and_reports_errors() -> None:
    server = LiveServer(FakeEngine(Script(delay=0.005, held_at=1, ends=False)), ServerOptions())
    engine = server.engine
    engine.let_go_at = 3
    requests = [bench_serve.Request([1, 2, 3], 5, 0.001 * i) for i in range(12)]
    try:
        results, seconds = asyncio.run(bench_serve.send(server.url, requests, max_concurrency=3))
        assert engine.most_running == 3
        assert [result["output_tokens"] for result in results] == [5] * 12
        assert all(len(result["itl"]) == 4 for result in results)
        assert all(0 < r["ttft"] < r["e2e"] < seconds for r in results)
        refused, _ = asyncio.run(bench_serve.send(server.url, [bench_serve.Request([1] * 400, 5)]))
        assert refused[0]["error"].startswith("400: ")
    finally:
        server.close()


@pytest.mark.slow
def test_serving_and_start_up_are_measured_on_a_real_server(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ServerProcess(tmp_path, tiny_model, "--threads", "1", "--served-model-name", "tiny")
    try:
        server.wait_ready()
        load = ["--num-prompts", "4", "--input-len", "8-16", "--output-len", "5"]
        assert bench.main(["serve", "--url", server.url, *load, "--output-json", "-"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["model"], figures["requests"], figures["errors"]) == ("tiny", 4, 0)
        assert [result["output_tokens"] for result in figures["results"]] == [5] * 4
        assert all(8 <= result["input_tokens"] <= 16 for result in figures["results"])
        assert figures["ttft_ms"]["p50"] > 0 and figures["decode_bound_tokens_per_s"] > 0
        assert bench.main(["serve", "--url", server.url, *load, "--model", "other"]) == 1
        assert "model 'other' is not served there; served: tiny" in capsys.readouterr().err
    finally:
        server.close()
    options = ["--idle-seconds", "0.5", "--output-json", "-"]
    assert bench.main(["startup", tiny_model, *options]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0 < figures["ready_s"] < 120 and 20 < figures["resident_mb"] < 4000
    assert figures["idle_cpu_percent"] < 50
