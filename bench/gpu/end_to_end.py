"""Tokens/s of whole engines with random weights at the shapes of known models. JSON lines.

    python bench/gpu/end_to_end.py [--shape qwen3-0.6b] [--batch 256] [--dry-run]

For each shape: decode at batch 1 and at a large batch (time per step, which is the time between a
sequence's tokens; host time of a step; share of the time in which the GPU had nothing to do), then
a load of prompts. The bound of a decode step is the weights and KV that it reads, at the measured
copy bandwidth. In a dry run the engine of three processes computes on the CPU, and the one whose
steps are taken apart runs the CUDA kernels on the host.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from timing import Bench, start
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vllm_lite import LLM, SamplingParams
from vllm_lite.model_config import ModelConfig
from vllm_lite.worker.worker import Worker

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
TINY = SHAPES["qwen3-0.6b"] | {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 160, "vocab_size": 400,
}  # fmt: skip
COMMON = {
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def make_model(directory: Path, shape: dict[str, Any]) -> None:
    """config.json and a tokenizer of 256 bytes: prompts are token ids anyway."""
    (directory / "config.json").write_text(json.dumps(COMMON | shape))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )


def make_engine(bench: Bench, directory: str, batch: int, **options: Any) -> LLM:
    if bench.dry_run:
        options["num_threads"] = 1
    return LLM(directory, load_format="dummy", device=bench.device, max_num_seqs=batch, **options)


def generate(llm: LLM, count: int, length: int, num_tokens: int) -> float:
    """Seconds for ``num_tokens`` tokens of each of ``count`` prompts, the same in every call."""
    vocab_size = llm.engine.model_config.vocab_size
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(2, vocab_size, (count, length), generator=generator)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": row.tolist()} for row in ids], params, use_tqdm=False
    )
    seconds = time.perf_counter() - begin
    for output in outputs:
        sample = output.outputs[0]
        if len(sample.token_ids) != num_tokens:
            raise AssertionError(f"a request ended early: {sample.finish_reason}, {output.error}")
    return seconds


def decode_seconds(bench: Bench, llm: LLM, batch: int, length: int) -> float:
    """Time per step: the difference of two runs, so that prefill does not count."""
    few, many = bench.pick((8, 72), (2, 6))
    generate(llm, batch, length, few)  # captures the graph, fills the prefix cache
    before = generate(llm, batch, length, few)
    return (generate(llm, batch, length, many) - before) / (many - few)


def step_parts(bench: Bench, llm: LLM, batch: int, length: int) -> tuple[float, float]:
    """(host seconds to launch a decode step, seconds that its kernels run), in one process."""
    launched: list[float] = []
    launch = Worker.launch

    def timed(worker: Worker, plan: memoryview) -> object:
        begin = time.perf_counter()
        pending = launch(worker, plan)
        launched.append(time.perf_counter() - begin)
        return pending

    num_tokens = bench.pick(34, 4)
    generate(llm, batch, length, num_tokens)
    activity = torch.profiler.ProfilerActivity
    Worker.launch = timed  # type: ignore[method-assign,assignment]
    try:
        with torch.profiler.profile(activities=[bench.pick(activity.CUDA, activity.CPU)]) as seen:
            generate(llm, batch, length, num_tokens)
    finally:
        Worker.launch = launch  # type: ignore[method-assign]
    # The first steps, which compute the ends of the prompts, are few: the median is a decode's.
    kernels = sum(event.self_device_time_total for event in seen.key_averages()) * 1e-6
    if kernels == 0 and not bench.dry_run:
        raise RuntimeError("the profiler has seen no kernel: the GPU's idle share is not known")
    return sorted(launched)[len(launched) // 2], kernels / len(launched)


def least_step_seconds(bench: Bench, model: ModelConfig, batch: int, length: int) -> float:
    """To read all weights, but for the embedding's other rows, and the KV once."""
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_size
    layer = model.hidden_size * (heads + 3 * model.intermediate_size)
    weights = model.num_layers * layer + model.vocab_size * model.hidden_size
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_size * batch * length
    return 2 * (weights + kv) / bench.ceilings.copy_bandwidth


def bench_shape(bench: Bench, name: str, directory: str, batch: int) -> None:
    length, prompt_length, out = bench.pick((512, 1024, 128), (40, 24, 4))
    steps = [(size, length) for size in (1, batch)]
    with make_engine(bench, directory, batch, multiprocess=True) as llm:
        decodes = [decode_seconds(bench, llm, *step) for step in steps]
        count = 2 * batch
        seconds = generate(llm, count, prompt_length, out)
        bench.report(
            "end to end", f"{name}, {count} prompts of {prompt_length} tokens, {out} out", seconds,
            output_tokens_per_s=count * out / seconds,
            total_tokens_per_s=count * (prompt_length + out) / seconds,
        )  # fmt: skip
        model = llm.engine.model_config
    bench.release_memory()
    with make_engine(bench, directory, batch) as llm:
        if bench.dry_run:
            from engine.planned import with_plans

            with_plans(llm)
        for step, seconds in zip(steps, decodes, strict=True):
            host, kernels = step_parts(bench, llm, *step)
            least = least_step_seconds(bench, model, *step)
            bench.report(
                "end to end", f"{name}, decode, batch {step[0]}, context {length}", seconds,
                tokens_per_s=step[0] / seconds, bound_us=least * 1e6, share=least / seconds,
                host_us=host * 1e6, gpu_idle_share=max(0.0, 1 - kernels / seconds),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--batch", type=int, default=256)
    bench, arguments = start(parser)
    shapes = {name: SHAPES[name] for name in arguments.shape or SHAPES}
    for name, shape in bench.pick(shapes, {"tiny": TINY}).items():
        bench.release_memory()
        with tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory), shape)
            bench_shape(bench, name, directory, bench.pick(arguments.batch, 3))


if __name__ == "__main__":
    main()
