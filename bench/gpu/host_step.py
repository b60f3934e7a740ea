"""The worker's time on the host for a decode step as on a GPU; needs no GPU. JSON lines.

    python bench/gpu/host_step.py [--seqs 256] [--context 512] [--repeats 1000]

Steps are planned by an engine core; each part of the worker's way to launch one is then timed on
its own. What would call a device is left out: the copies, the graph's replay, the sampler's
kernels. Changes are applied to tensors on the CPU, with the same torch calls. ``us`` is a median,
``least_us`` the best; ``device_calls``: copies, kernels, graphs and events that the part sends to
the device.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from end_to_end import SHAPES, make_model

from vllm_lite import Engine, SamplingParams, ops
from vllm_lite.clients import InProcessClient
from vllm_lite.messages import decode_outputs
from vllm_lite.worker.sampler import PendingResult
from vllm_lite.worker.step_inputs import InputSizes, StepInputs, load, upload
from vllm_lite.worker.step_plan import StepPlan, encode_result
from vllm_lite.worker.worker import Worker

# Of an H200.
NUM_MULTIPROCESSORS = 132
# The attention of Llama 3 8B; the rest of the model is not looked at.
SHAPE = SHAPES["llama-3-8b"] | {
    "hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 160, "vocab_size": 400,
}  # fmt: skip
BLOCK_SIZE = 16


class NoGraphs:
    """In the place of ``DecodeGraphs``: one size, and a replay that does nothing."""

    def __init__(self, inputs: StepInputs, vocab_size: int) -> None:
        self._inputs = inputs
        self._logits = torch.zeros(inputs.sizes.num_seqs, vocab_size)

    def inputs_for(self, num_seqs: int) -> StepInputs:
        return self._inputs

    def run(self, inputs: StepInputs) -> torch.Tensor:
        return self._logits


class Parts:
    def __init__(self, repeats: int) -> None:
        self._repeats = repeats

    def report(self, name: str, times: list[float], device_calls: int) -> None:
        times = sorted(times)
        line = {
            "stage": "host step",
            "name": name,
            "us": round(times[len(times) // 2] * 1e6, 1),
            "least_us": round(times[0] * 1e6, 1),
            "device_calls": device_calls,
        }
        print(json.dumps(line), flush=True)

    def measure(self, name: str, run: Callable[[], object], device_calls: int = 0) -> None:
        times = []
        for _ in range(self._repeats):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        self.report(name, times, device_calls)


def make_worker(engine: Engine, num_seqs: int) -> tuple[Worker, InputSizes]:
    """The engine's, as it is on a GPU but for the device. (the worker, sizes of a decode step)"""
    assert isinstance(engine.client, InProcessClient)
    worker = engine.client._worker
    config = engine.model_config
    worker._recorded = None
    worker._workspace = torch.empty(
        ops.attention_workspace_size(config.num_kv_heads, config.head_size)
    )
    worker._num_multiprocessors = NUM_MULTIPROCESSORS
    sizes = worker._input_sizes(num_seqs, num_seqs, num_seqs)
    worker._graphs = NoGraphs(worker._make_inputs(sizes), config.vocab_size)  # type: ignore[assignment]
    return worker, sizes


def plans_of(engine: Engine, num_seqs: int, count: int, parts: Parts) -> list[bytes]:
    """``count`` plans of decodes alone, each planned while the one before is in flight."""
    assert isinstance(engine.client, InProcessClient)
    core = engine.client._core
    plans: list[bytes] = []
    plan_times, commit_times, front_times = [], [], []
    unanswered: list[StepPlan] = []
    while len(plans) < count:
        begin = time.perf_counter()
        words = core.begin_step()
        planned = time.perf_counter() - begin
        assert words is not None
        plan = StepPlan(words)
        unanswered.append(plan)
        if plan.num_placeholders == num_seqs:
            plan_times.append(planned)
            plans.append(bytes(words))
        if len(unanswered) == 1:
            continue
        oldest = unanswered.pop(0)
        tokens = torch.full((oldest.num_logits,), 50, dtype=torch.int32).numpy()
        result = encode_result(oldest, 0, tokens)
        begin = time.perf_counter()
        core.finish_step(result)
        committed = time.perf_counter()
        news = core.take_outputs(0)
        assert news is not None
        engine.process(decode_outputs(news))
        if oldest.num_placeholders == num_seqs:
            commit_times.append(committed - begin)
            front_times.append(time.perf_counter() - committed)
    parts.report("engine core: plan", plan_times, 0)
    parts.report("engine core: commit, text and outputs of every sequence", commit_times, 0)
    parts.report("front end, if in this process: RequestOutputs", front_times, 0)
    return plans


def num_table_updates(plan: StepPlan) -> int:
    return len(plan.split_changes(plan.changes).table_updates)


def add_requests(engine: Engine, num_seqs: int, context: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for key in range(num_seqs):
        # Their tables grow in different steps.
        prompt = [2 + (7 * i + key) % 250 for i in range(context + key % BLOCK_SIZE)]
        engine.add_request(str(key), {"prompt_token_ids": prompt}, params)


def bench(engine: Engine, num_seqs: int, context: int, repeats: int) -> None:
    parts = Parts(repeats)
    worker, sizes = make_worker(engine, num_seqs)
    add_requests(engine, num_seqs, context)
    plans = plans_of(engine, num_seqs, 100, parts)
    plan_bytes = max(plans, key=lambda words: num_table_updates(StepPlan(words)))
    plan = StepPlan(plan_bytes)
    words = torch.zeros(sizes.num_words(), dtype=torch.int32)
    device = torch.device("cpu")

    def load_alone() -> None:
        load(plan, sizes, words, lambda *_: None)

    def plan_alone() -> None:
        worker._plan_attention(query_start, seq_lens, attention_plan)

    load_alone()
    attention_plan, _, _, _, query_start, seq_lens, *_ = words.split_with_sizes(sizes.sections())
    sampled = torch.full((num_seqs,), 50, dtype=torch.int32)
    pending = PendingResult(plan, 0, sampled)
    worker._sampler.sample = lambda *_: sampled  # type: ignore[method-assign]
    parts.measure("read the plan", lambda: StepPlan(plan_bytes))
    parts.measure("inputs from the plan (load_step)", load_alone)
    parts.measure(f"plan attention, {NUM_MULTIPROCESSORS} multiprocessors", plan_alone)
    parts.measure("upload: the two above, staging, changes; one copy",
                  lambda: upload(plan, sizes, worker._plan_attention, device), 1)  # fmt: skip
    # index_put_ makes 64-bit numbers of both columns first.
    parts.measure(f"apply {num_table_updates(plan)} table updates",
                  lambda: worker._apply_changes(plan, plan.changes), 3)  # fmt: skip
    parts.measure("the whole launch, without the sampler", lambda: worker.launch(plan_bytes), 6)
    del worker._sampler.sample
    bench_sampler(parts, worker, plan)
    parts.measure("words of the result", pending.wait)


def bench_sampler(parts: Parts, worker: Worker, plan: StepPlan) -> None:
    """``Sampler.sample`` around its op: prepare, weigh, collect, choose; then the result's copy and
    its event.
    """
    rows = torch.arange(plan.num_logits, dtype=torch.int32)
    logits = torch.zeros(plan.num_logits, 400)
    op = ops.sample
    ops.sample = lambda *_: None
    try:
        parts.measure("the sampler, without its op and the result's copy",
                      lambda: worker._sampler.sample(logits, rows, rows, plan), 6)  # fmt: skip
    finally:
        ops.sample = op
    sampler, none = worker._sampler, logits[:0]
    parts.measure("the sampler's op, without rows",
                  lambda: ops.sample(none, rows[:0], rows[:0], sampler._row_state, None, None, None,
                                     rows[:0], None, None, None, None, None,
                                     sampler.last_tokens))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=1000)
    arguments = parser.parse_args()
    num_seqs, context = arguments.seqs, arguments.context
    length = context + 256
    blocks = num_seqs * -(-length // BLOCK_SIZE)
    options: dict[str, Any] = {
        "device": "cpu", "num_threads": 1, "load_format": "dummy", "max_num_seqs": num_seqs,
        "max_model_len": length, "block_size": BLOCK_SIZE, "async_scheduling": True,
        # Of one layer; its pages are not touched.
        "kv_cache_memory": blocks * BLOCK_SIZE * 4 * 8 * 128,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), SHAPE)
        with Engine(directory, **options) as engine:
            bench(engine, num_seqs, context, arguments.repeats)


if __name__ == "__main__":
    main()
