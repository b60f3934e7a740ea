"""The engine on the CUDA kernels, run on the host: attention plans and padded steps as on a GPU.

What only a device has (streams, pinned copies, real graphs) is stood in for; the kernels, the
attention plan and the layout of a step's inputs are the product's own.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import PagedRunner, load, make_model, prompt, reference_logits, save
from engine.delayed import DelayedDevice
from engine.planned import with_plans
from ops.back_ends import use
from tiny_model import NUM_LAYERS, VOCAB_SIZE, block_bytes
from vllm_lite import LLM, PoolingParams, SamplingParams, StructuredOutputsParams, ops
from vllm_lite.config import MIN_LOGITS_ROWS, EngineConfig
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles
from vllm_lite.outputs import PoolingRequestOutput
from vllm_lite.sampling_params import MAX_LOGPROBS
from vllm_lite.worker import worker as worker_module
from vllm_lite.worker.cuda import DecodeGraphs, measured_kv_memory, unmeasured_bytes
from vllm_lite.worker.largest_step import largest_plan
from vllm_lite.worker.step_inputs import upload
from vllm_lite.worker.step_plan import HEADER_WORDS, StepPlan
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


def captured(
    graph: ReplayedEagerly, pool: object, capture_error_mode: str
) -> AbstractContextManager[None]:
    """In the place of torch.cuda.graph. What masks need goes on in another thread meanwhile."""
    assert capture_error_mode == "thread_local"
    return nullcontext()


def with_graphs(worker: Worker, patch: pytest.MonkeyPatch) -> DecodeGraphs:
    patch.setattr(torch.cuda, "CUDAGraph", ReplayedEagerly)
    patch.setattr(torch.cuda, "graph", captured)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = DecodeGraphs(
        8, lambda n: worker._make_inputs(worker._input_sizes(n, n, n)), worker._forward
    )
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


@pytest.mark.parametrize(
    ("family", "config"), [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 16})]
)
def test_logits_are_as_near_to_float32_as_those_of_the_cpu(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_model(family, **config)
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


def test_drafts_change_no_token_with_graphs_or_without(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts replay no graph; those between them do."""
    prompts = [{"prompt_token_ids": [7, 8, 9 + i] * 5 + [7, 8]} for i in range(3)]
    params = [
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, repetition_penalty=0.8),
        SamplingParams(temperature=0.3, seed=1, top_p=0.9, max_tokens=16, ignore_eos=True),
    ]
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    found, replayed = [], []
    run = DecodeGraphs.run
    monkeypatch.setattr(
        DecodeGraphs, "run", lambda graphs, inputs: replayed.append(inputs) or run(graphs, inputs)
    )
    with on_host():
        for speculative, graphs in ((None, False), (ngram, False), (ngram, True)):
            with LLM(
                tiny_model, num_threads=1, max_model_len=128, dtype="bfloat16",
                speculative_config=speculative,
            ) as llm:  # fmt: skip
                worker = with_plans(llm)
                if graphs:
                    with_graphs(worker, monkeypatch)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found.append([output.outputs[0].token_ids for output in outputs])
                stats = llm.engine.stats()
            if speculative is not None:
                assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
            assert (len(replayed) > 1) == graphs
    assert found[0] == found[1] == found[2]


def with_float8_cache(llm: LLM) -> None:
    """The KV arena that --kv-cache-dtype fp8 gives a worker on a GPU."""
    worker = with_plans(llm)
    worker._kv_cache_dtype = "float8_e4m3fn"
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
        alone = tokens_and_logprobs(llm, PROMPTS[:1])
        assert list(graphs._made) == [4, 1]
        # A place of its own for each graph would be a gigabyte, of a large vocabulary.
        places = {
            size.logits.data_ptr() for size in graphs._made.values() if size.logits is not None
        }
        assert len(places) == 1
        padded.append(alone[0])
        plain.append(plain[0])
    for (tokens, logprobs), (expected, expected_logprobs) in zip(padded, plain, strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


def test_asynchronous_scheduling_with_graphs_changes_no_token(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's way: placeholders in replayed steps, in a pool so small that some are preempted."""
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1, seed=7, max_tokens=20, ignore_eos=True, n=2),
        SamplingParams(temperature=1, seed=3, max_tokens=20, stop=["e", "o", "a"]),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, presence_penalty=0.5),
    ] * 2

    def run(async_scheduling: bool) -> tuple[list[list[list[int]]], int]:
        with LLM(
            tiny_model, num_threads=1, max_model_len=64, dtype="bfloat16", max_num_seqs=8,
            kv_cache_memory=5 * block_bytes() // 2, async_scheduling=async_scheduling,
        ) as llm:  # fmt: skip
            worker = with_plans(llm)
            if async_scheduling:
                with_graphs(worker, monkeypatch)
            outputs = llm.generate(PROMPTS[:3] * 2 + PROMPTS[:2], params, use_tqdm=False)
            tokens = [[sample.token_ids for sample in output.outputs] for output in outputs]
            return tokens, llm.engine.stats().num_preemptions

    with on_host():
        expected, _ = run(async_scheduling=False)
        device = DelayedDevice(monkeypatch)
        found, num_preemptions = run(async_scheduling=True)
    assert found == expected
    assert num_preemptions > 0
    assert device.num_placeholders > device.num_launched / 2
    assert device.in_flight_at_launch.count(1) > device.num_launched / 2
    graphs = ReplayedEagerly.graphs
    assert len([size for size in graphs._made.values() if size.graph is not None]) > 1


def test_kv_memory_is_the_devices_less_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    properties = type("Properties", (), {"total_memory": 80 * gib})()
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 20 * gib)
    runs: list[int] = []
    assert measured_kv_memory(0.5, gib, lambda: runs.append(1)) == (40 - 20 - 1) * gib
    assert runs == [1]
    with pytest.raises(ValueError, match="--gpu-memory-utilization"):
        measured_kv_memory(0.2, gib, lambda: None)


def test_what_is_not_measured_grows_with_the_graphs() -> None:
    eager = unmeasured_bytes(32, [])
    few, many = unmeasured_bytes(32, [1 << 20] * 10), unmeasured_bytes(32, [1 << 20] * 40)
    assert eager < few < many
    assert unmeasured_bytes(80, [1 << 20] * 40) - many == 40 * 48 * (256 << 10)
    assert unmeasured_bytes(32, [3 << 20] * 10) - few == 20 << 20


def test_what_comes_with_the_first_grammar_and_the_first_mean_is_in_the_bound(
    tiny_model: str,
) -> None:
    """A step with drafts has more masks than sequences."""
    num_masks: list[int] = []
    masks_on_device = Worker._masks_on_device
    params = SamplingParams(
        temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="(ab){20}")
    )

    def seen(worker: Worker, *masks: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        made = masks_on_device(worker, *masks)
        if made[0] is not None:
            num_masks.append(made[0].nbytes)
        return made

    with (
        on_host(),
        pytest.MonkeyPatch.context() as patch,
        LLM(
            tiny_model, num_threads=1, max_model_len=64, dtype="bfloat16", max_num_seqs=2,
            enforce_eager=True,
            speculative_config={"method": "ngram", "num_speculative_tokens": 5},
        ) as llm,
    ):  # fmt: skip
        worker = with_plans(llm)
        patch.setattr(Worker, "_masks_on_device", seen)
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
        llm.embed(PROMPTS[:2], PoolingParams(pooling_type="MEAN"), use_tqdm=False)
        pooler = worker._pooler
        assert pooler._sums is not None and pooler._broken is not None
        needed = max(num_masks) + pooler._sums.nbytes + pooler._broken.nbytes
        assert max(num_masks) > 2 * min(num_masks)
        assert needed <= worker._unmeasured_bytes() - unmeasured_bytes(NUM_LAYERS, [])


def test_the_largest_step_attends_and_samples_at_the_largest_sizes(tiny_model: str) -> None:
    num_tokens, num_seqs, max_model_len = 97, 6, 64
    attended: list[tuple[int, list[int], torch.Tensor]] = []
    sampled: list[dict[str, torch.Tensor]] = []
    with (
        on_host(),
        pytest.MonkeyPatch.context() as patch,
        LLM(
            tiny_model, num_threads=1, dtype="bfloat16", max_model_len=max_model_len,
            max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs,
        ) as llm,
    ):  # fmt: skip
        worker = with_plans(llm)
        arena = worker.kv_arena
        attention, sample = ops.paged_attention, ops.sample

        def attend(out: torch.Tensor, query: torch.Tensor, *args: torch.Tensor, **named: object):  # type: ignore[no-untyped-def]
            out.fill_(torch.nan)
            attention(out, query, *args, **named)  # type: ignore[arg-type]
            attended.append((len(query), args[4].tolist(), out.clone()))

        def choose(logits: torch.Tensor, *args: torch.Tensor) -> None:
            sample(logits, *args)
            names = ("rows", "positions", "states", "lists", "counts", "mask", "tokens")
            names += ("logprobs", "ranks", "top_ids")
            sampled.append(dict(zip(names, args, strict=False), logits=logits))

        patch.setattr(ops, "paged_attention", attend)
        patch.setattr(ops, "sample", choose)
        worker._run_largest_step()
        # What only some requests need is made when the first of them comes.
        assert worker._sampler._id_lists is None and worker._sampler._output_counts is None
        worker.kv_arena = arena

    assert len(attended) == NUM_LAYERS
    for tokens, seq_lens, out in attended:
        assert tokens == num_tokens == sum(seq_lens) and seq_lens == [16] * 5 + [17]
        assert out.isfinite().all() and (out != 0).any(-1).all()
    step, *scored = sampled
    # All tokens that are not sampled from, in pieces.
    assert [len(piece["logits"]) for piece in scored] == [
        MIN_LOGITS_ROWS,
        num_tokens - num_seqs - MIN_LOGITS_ROWS,
    ]
    for piece in scored:
        assert (piece["ranks"] > 0).all() and piece["top_ids"].shape[1] == MAX_LOGPROBS
    assert step["logits"].shape == (num_seqs, VOCAB_SIZE) and step["logits"].std() > 0
    assert step["rows"].tolist() == list(range(num_seqs))
    assert step["positions"].tolist() == [16] * 5 + [17]
    assert (step["tokens"] >= 0).all() and (step["ranks"] > 0).all()
    assert step["top_ids"].shape == (num_seqs, MAX_LOGPROBS) and (step["top_ids"] >= 0).all()
    # The histories, and what was sampled.
    histories = [max_model_len] + [1] * (num_seqs - 1)
    assert step["counts"].sum(-1).tolist() == [length + 1 for length in histories]
    # Of biases two words, of allowed and stop ids one: as many as there are tokens.
    assert step["lists"].shape[1] >= 4 * VOCAB_SIZE


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "expected"),
    [(2048, 256, (2048, 256)), (3, 8, (3, 3)), (500, 3, (192, 3)), (100, 1, (64, 1))],
)
def test_the_largest_plan_is_one_that_may_come(
    num_tokens: int, num_seqs: int, expected: tuple[int, int]
) -> None:
    """No more sequences than tokens, and none longer than a sequence may be."""
    plan = StepPlan(largest_plan(num_tokens, num_seqs, 64, 16, 1000))
    assert (plan.num_tokens, plan.num_seqs) == expected
    slots, tokens, positions, starts, lens, rows, indices = plan.words[
        HEADER_WORDS : len(plan.words) - len(plan.changes)
    ].split([2 * expected[0], *[expected[0]] * 2, expected[1] + 1, *[expected[1]] * 3])
    assert (tokens == 0).all() and (slots.view(torch.int64) == positions % 16).all()
    assert positions.max() + 1 == lens.max() <= 64
    assert starts.diff().tolist() == lens.tolist() and indices.tolist() == (starts[1:] - 1).tolist()
    updates = plan.split_changes(plan.changes).table_updates
    assert updates[:, 0].bincount().tolist() == (-(-lens // 16)).tolist()
    assert updates[:, 2].sum() == 0 and rows.tolist() == list(range(expected[1]))


def test_all_of_a_step_goes_to_the_device_in_its_upload(tiny_model: str) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=6, logit_bias={5: 4.0, 9: 3.0}, min_tokens=5),
        SamplingParams(temperature=1, seed=3, max_tokens=6, n=2, presence_penalty=1.5),
        SamplingParams(temperature=1, seed=4, max_tokens=6, allowed_token_ids=list(range(40, 90))),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]{6}"), seed=5),
    ]
    num_changes: list[int] = []

    def upload_and_forget(plan: StepPlan, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Whoever reads the plan afterwards finds nothing but how long the lists are."""
        sent = upload(plan, *args)  # type: ignore[arg-type]
        changes = plan.split_changes(plan.changes)
        counts = changes.new_rows.clone()
        plan.words.fill_(-(2**31))
        changes.new_rows[:] = counts
        num_changes.append(len(plan.changes))
        return sent

    def run(llm: LLM) -> list[list[list[int]]]:
        outputs = llm.generate(PROMPTS[:4], params, use_tqdm=False)
        return [[one.token_ids for one in output.outputs] for output in outputs]

    with on_host(), LLM(tiny_model, num_threads=1, max_model_len=256, dtype="bfloat16") as llm:
        with_plans(llm)
        expected = run(llm)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_module, "upload", upload_and_forget)
            assert run(llm) == expected
    assert sum(count > 0 for count in num_changes) > 1 and len(num_changes) >= 6


def test_prompts_scores_and_vectors_are_near_those_of_the_cpu(tiny_model: str) -> None:
    """The sampler's kernels with one token allowed, in pieces; the same bits however it is cut."""
    ids = [prompt(length, seed=length, vocab_size=VOCAB_SIZE) for length in (2, 20, 90)]
    params: list[SamplingParams | PoolingParams] = [
        SamplingParams(max_tokens=0, prompt_logprobs=2),
        PoolingParams(),
        PoolingParams(pooling_type="MEAN"),
    ]

    def numbers(llm: LLM) -> list[list[float]]:
        found = []
        for one in params:
            for output in llm._run(list(ids), [one] * 3, [0] * 3, use_tqdm=False):
                if isinstance(output, PoolingRequestOutput):
                    found.append(output.outputs.data)
                    continue
                assert output.prompt_logprobs is not None
                found.append(output.prompt_logprobs.values())
        return found

    options: dict[str, Any] = {"num_threads": 1, "max_model_len": 256, "dtype": "bfloat16"}
    with LLM(tiny_model, **options) as llm:
        expected = numbers(llm)
    made = []
    for chunk in (0, 40):
        with on_host(), LLM(tiny_model, **options, max_chunk_tokens=chunk) as llm:
            with_plans(llm)
            made.append(numbers(llm))
    assert made[0] == made[1]
    for ours, cpus in zip(made[0], expected, strict=True):
        assert ours == pytest.approx(cpus, abs=0.1)
