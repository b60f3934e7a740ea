"""``LLM`` as a part of somebody's program: its event loop, threads, random numbers and metrics."""

import ast
import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

import vllm_lite
from vllm_lite import LLM, RequestOutputKind, SamplingParams
from vllm_lite.metrics import Counter, Gauge, Histogram

PACKAGE = Path(vllm_lite.__file__).parent
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, num_threads=1, max_model_len=256, max_num_waiting=8) as made:
        yield made


def ids(llm: LLM, prompts: object, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    return [sample.token_ids for output in outputs for sample in output.outputs]


def test_works_in_a_notebook_cell_and_twice(llm: LLM, tiny_model: str) -> None:
    """A cell runs inside an event loop; its engine is made there, used there and made again."""
    expected = ids(llm, "The quick")

    async def cell() -> list[list[int]]:
        found = []
        for _ in range(2):
            with LLM(tiny_model, num_threads=1, max_model_len=256) as made:
                found += ids(made, "The quick")
                await asyncio.sleep(0)
        return found

    assert asyncio.run(cell()) == expected * 2


def test_works_in_a_thread_beside_an_event_loop(tiny_model: str, llm: LLM) -> None:
    expected = ids(llm, "The quick")

    def work() -> list[list[int]]:
        with LLM(tiny_model, num_threads=1, max_model_len=256) as made:
            return ids(made, "The quick")

    async def main() -> list[list[int]]:
        return await asyncio.to_thread(work)

    assert asyncio.run(main()) == expected


def test_every_output_kind_gives_the_whole_answer(llm: LLM) -> None:
    """A list of answers has no use for parts."""
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=kind)
        output = llm.generate("The", params, use_tqdm=False)[0]
        assert output.finished and len(output.outputs[0].token_ids) == 6
        assert output.outputs[0].token_ids == ids(llm, "The")[0]


@pytest.mark.case("SED-05")
def test_the_programs_random_numbers_go_on_as_if_there_were_no_engine(tiny_model: str) -> None:
    def draw() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    def seed() -> None:
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = draw() + draw()
    seed()
    found = draw()
    with LLM(tiny_model, num_threads=1, max_model_len=256) as made:
        ids(made, ["The", "dog"], SamplingParams(temperature=1, max_tokens=8))
        ids(made, "The", SamplingParams(temperature=1, max_tokens=8, seed=5))
    assert found + draw() == expected


@pytest.mark.case("SED-03")
def test_requests_without_a_seed_differ(llm: LLM, tiny_model: str) -> None:
    """In a batch, one after another, as samples of one request, and after a restart."""
    random.seed(1)
    torch.manual_seed(1)
    free = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True)
    batch = ids(llm, ["The"] * 8, free)
    later = [ids(llm, "The", free)[0] for _ in range(8)]
    samples = ids(llm, "The", SamplingParams(temperature=1, max_tokens=12, ignore_eos=True, n=8))
    random.seed(1)
    torch.manual_seed(1)
    with LLM(tiny_model, num_threads=1, max_model_len=256) as again:
        restarted = ids(again, ["The"] * 8, free)
    found = {tuple(answer) for answer in batch + later + samples + restarted}
    assert len(found) == 32


@pytest.mark.case("PYV-01")
def test_keys_of_the_prefix_cache_do_not_depend_on_pythons_hash() -> None:
    """What the engine core makes keys of, token ids and salt, is the same in every process."""
    code = (
        "from vllm_lite import SamplingParams\n"
        "from vllm_lite.messages import encode\n"
        "from vllm_lite.requests import make_add_request\n"
        "params = SamplingParams(seed=1)\n"
        "request = make_add_request(1, [1, 2, 3], params, 0, 'tenant', [0], 64, None)\n"
        "print(encode(request).hex())"
    )
    found = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONHASHSEED": seed}
        found.add(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))
    assert len(found) == 1
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hash", f"{path}:{node.lineno}"


# --- metrics --------------------------------------------------------------------------------------


def by_name(llm: LLM) -> dict[tuple[str, str], Counter | Gauge | Histogram]:
    """(name without prefix, finished_reason) to the metric."""
    found = {}
    for metric in llm.get_metrics():
        assert isinstance(metric, Counter | Gauge | Histogram)
        assert metric.name.startswith("vllm_lite:")
        assert metric.labels["model_name"] == llm.engine.config.model
        key = metric.name.removeprefix("vllm_lite:"), metric.labels.get("finished_reason", "")
        assert key not in found
        found[key] = metric
    return found


def test_metrics_count_what_was_generated(tiny_model: str) -> None:
    with LLM(tiny_model, num_threads=1, max_model_len=256) as llm:
        prompts = [[5] * 40, [5] * 40, [6, 7]]
        llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.generate([[5] * 40], GREEDY, use_tqdm=False)
        stop = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=list(range(400)))
        llm.generate([[6, 7]], stop, use_tqdm=False)
        found = by_name(llm)
        assert found["prompt_tokens", ""].value == 40 * 3 + 2 * 2
        assert found["generation_tokens", ""].value == 4 * 6 + 1
        assert found["request_success", "length"].value == 4
        assert found["request_success", "stop"].value == 1
        assert found["request_success", "error"].value == 0
        latency = found["e2e_request_latency_seconds", ""]
        assert latency.count == 5 and latency.sum > 0
        assert latency.buckets["+Inf"] == 5
        counts = list(latency.buckets.values())
        assert counts == sorted(counts)
        queries, hits = found["prefix_cache_queries", ""], found["prefix_cache_hits", ""]
        assert queries.value >= hits.value >= 32
        assert found["num_requests_running", ""].value == 0
        assert found["kv_cache_usage_perc", ""].value == 0
        # They are the caller's own, and go on afterwards.
        found["generation_tokens", ""].value = 0
        assert by_name(llm)["generation_tokens", ""].value == 25
    assert by_name(llm)["generation_tokens", ""].value == 25  # also when it is closed


def test_metrics_of_what_was_given_up_and_what_failed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_lite.worker.worker import Worker

    before = by_name(llm)

    def fail(error: BaseException) -> None:
        def raising(*_: object) -> object:
            raise error

        monkeypatch.setattr(Worker, "launch", raising)

    fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ids(llm, ["The", "dog"])
    fail(MemoryError())
    assert llm.generate("The", GREEDY, use_tqdm=False)[0].error
    after = by_name(llm)

    def grown(*key: str) -> float:
        return after[key].value - before[key].value

    assert grown("request_success", "abort") == 2
    assert grown("prompt_tokens", "") == grown("generation_tokens", "") == 0
    with pytest.raises(ValueError, match="empty"):
        ids(llm, ["The", ""])
    assert by_name(llm)["request_success", "error"].value == after["request_success", "error"].value


def test_metrics_can_be_read_from_another_thread_while_it_generates(tiny_model: str) -> None:
    with LLM(tiny_model, num_threads=1, max_model_len=2048) as llm:
        work = threading.Thread(
            target=lambda: ids(llm, ["The"] * 4, SamplingParams(max_tokens=40, ignore_eos=True))
        )
        work.start()
        seen = []
        while work.is_alive():
            seen.append(by_name(llm)["generation_tokens", ""].value)
        work.join()
        assert seen == sorted(seen)
        assert by_name(llm)["generation_tokens", ""].value == 160
