"""The engine on the CUDA kernels, run on the host: attention plans and padded steps as on a GPU.

What only a device has (streams, pinned copies, real graphs) is stood in for; the kernels, the
attention plan and the layout of a step's inputs are the product's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from checkpoints import PagedRunner, load, make_model, prompt, reference_logits, save
from engine.planned import with_plans
from ops.back_ends import use
from vllm_lite import LLM, SamplingParams, ops
from vllm_lite.config import EngineConfig
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles
from vllm_lite.worker.cuda import DecodeGraphs, measured_kv_memory
from vllm_lite.worker.worker import Worker

PROMPTS = ["The quick", "def f(x):", "Größe", "lazy dog, and it is what they have said. " * 3]
FLOAT8_ERROR = 0.1  # relative
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


@contextmanager
def on_host() -> Iterator[None]:
    paged_attention = ops.paged_attention
    with use("cuda_on_host"), pytest.MonkeyPatch.context() as patch:
        # The op as the product calls it: with the worker's plan.
        patch.setattr(ops, "paged_attention", paged_attention)
        yield


class ReplayedEagerly:
    """A CUDA graph whose replay runs the captured forward pass again into the same logits."""

    graphs: DecodeGraphs

    def replay(self) -> None:
        (size,) = (size for size in self.graphs._made.values() if size.graph is self)
        assert size.logits is not None
        size.logits.copy_(self.graphs._forward(size.inputs))


def with_graphs(worker: Worker, patch: pytest.MonkeyPatch) -> DecodeGraphs:
    patch.setattr(torch.cuda, "CUDAGraph", ReplayedEagerly)
    patch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = DecodeGraphs(8, lambda n: worker._make_inputs(n, n, n), worker._forward)
    ReplayedEagerly.graphs = worker._graphs = graphs
    return graphs


def tokens_and_logprobs(llm: LLM, prompts: list[str]) -> list[tuple[list[int], list[float]]]:
    found = []
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        sample = output.outputs[0]
        assert sample.logprobs is not None
        chosen = [
            here[token].logprob
            for token, here in zip(sample.token_ids, sample.logprobs, strict=True)
        ]
        found.append((sample.token_ids, chosen))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_as_near_to_float32_as_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    reference = make_model(family)
    files = save(reference, tmp_path)
    ids = prompt(40)
    expected = reference_logits(reference, ids)

    def error() -> float:
        logits = PagedRunner(load(files, dtype="bfloat16")).run(ids, [29, 6])
        return float((logits - expected).norm() / expected.norm())

    on_cpu = error()
    with use("cuda_on_host"), pytest.MonkeyPatch.context() as patch:
        planned = ops.paged_attention
        patch.setattr(ops, "paged_attention", lambda *args, plan, workspace: planned(*args))
        on_cuda = error()
    assert 0 < on_cuda < 1.2 * on_cpu


def test_planned_steps_give_the_tokens_of_the_cpu(tiny_model: str) -> None:
    def run(planned: bool) -> list[tuple[list[int], list[float]]]:
        with LLM(tiny_model, num_threads=1, max_model_len=256, dtype="bfloat16") as llm:
            if planned:
                with_plans(llm)
            return tokens_and_logprobs(llm, PROMPTS)

    theirs = run(planned=False)
    with on_host():
        ours = run(planned=True)
    for (tokens, logprobs), (expected, expected_logprobs) in zip(ours, theirs, strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=0.05)


def with_float8_cache(llm: LLM) -> None:
    """The KV arena that --kv-cache-dtype fp8 gives a worker on a GPU."""
    worker = with_plans(llm)
    worker._kv_dtype = torch.float8_e4m3fn
    worker.kv_arena = worker._make_arena(worker.kv_arena.shape[1])


def test_logits_over_a_float8_cache_are_near_those_over_bfloat16(tmp_path: Path) -> None:
    reference = make_model("llama")
    model = load(save(reference, tmp_path), dtype="bfloat16")
    ids = prompt(40)
    expected = reference_logits(reference, ids)
    with use("cuda_on_host"), pytest.MonkeyPatch.context() as patch:
        planned = ops.paged_attention
        patch.setattr(ops, "paged_attention", lambda *args, plan, workspace: planned(*args))
        errors = [
            float((PagedRunner(model, kv_dtype=dtype).run(ids, [29, 6]) - expected).norm())
            for dtype in (torch.bfloat16, torch.float8_e4m3fn)
        ]
    # E4M3 keeps four bits of a number where bfloat16 keeps eight.
    assert errors[0] < errors[1] < FLOAT8_ERROR * float(expected.norm())


def test_a_float8_cache_gives_a_request_the_same_tokens_alone_and_in_a_batch(
    tiny_model: str,
) -> None:
    options = {"num_threads": 1, "max_model_len": 256, "dtype": "bfloat16"}
    with on_host():
        with LLM(tiny_model, **options) as llm:
            with_plans(llm)
            wide = tokens_and_logprobs(llm, PROMPTS)
        with LLM(tiny_model, **options) as llm:
            with_float8_cache(llm)
            together = tokens_and_logprobs(llm, PROMPTS)
            # Again, from the blocks of the prefix cache where there are some.
            alone = [tokens_and_logprobs(llm, [text])[0] for text in PROMPTS]
    for (tokens, logprobs), (expected, expected_logprobs) in zip(alone, together, strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)
    for (_, logprobs), (_, theirs) in zip(together, wide, strict=True):
        assert logprobs != theirs
        assert logprobs[0] == pytest.approx(theirs[0], abs=0.2)


def test_a_float8_cache_holds_twice_the_tokens(tiny_model: str) -> None:
    model = load_model_config(ModelFiles(Path(tiny_model)))
    blocks = {
        name: EngineConfig(
            device="cuda", dtype="bfloat16", kv_cache_dtype=name, kv_cache_memory=1 << 28
        ).resolve(model)
        for name in ("auto", "fp8")
    }
    assert blocks["auto"].kv_cache_dtype == "bfloat16"
    assert blocks["fp8"].kv_cache_dtype == "float8_e4m3fn"
    assert blocks["auto"].block_bytes == 2 * blocks["fp8"].block_bytes
    assert blocks["auto"].num_blocks is not None
    assert blocks["fp8"].num_blocks == 2 * blocks["auto"].num_blocks


def test_padded_decode_steps_change_nothing(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        on_host(),
        LLM(tiny_model, num_threads=1, max_model_len=256, dtype="bfloat16") as llm,
    ):
        worker = with_plans(llm)
        plain = tokens_and_logprobs(llm, PROMPTS[:3])
        graphs = with_graphs(worker, monkeypatch)
        padded = tokens_and_logprobs(llm, PROMPTS[:3])
        assert list(graphs._made) == [4]  # three sequences in a step of four
    for (tokens, logprobs), (expected, expected_logprobs) in zip(padded, plain, strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


def test_kv_memory_is_the_devices_less_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    properties = type("Properties", (), {"total_memory": 80 * gib})()
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 20 * gib)
    runs: list[int] = []
    assert measured_kv_memory(0.5, gib, lambda: runs.append(1)) == (40 - 20 - 1 - 1) * gib
    assert runs == [1]
    with pytest.raises(ValueError, match="--gpu-memory-utilization"):
        measured_kv_memory(0.2, gib, lambda: None)
