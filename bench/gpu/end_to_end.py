"""Tokens/s of whole engines with random weights at the shapes of known models. JSON lines.

    python bench/gpu/end_to_end.py [--shape qwen3-0.6b] [--batch 256]

For each shape: decode at batch 1 and at a large batch (time per step, host time of a step, share of
the time in which the GPU had nothing to do), then a mixed load. The bound of a decode step is the
weights and KV that it reads, at the measured copy bandwidth.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from timing import measure_ceilings, report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vllm_lite import LLM, SamplingParams

SHAPES = {
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
COMMON = {
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 16384,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def make_model(directory: Path, shape: str) -> None:
    """config.json and a tokenizer of 256 bytes: prompts are token ids anyway."""
    (directory / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )


def prompts(count: int, length: int, vocab_size: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocab_size, (count, length), generator=generator)
    return [{"prompt_token_ids": row.tolist()} for row in ids]


def decode_seconds(llm: LLM, batch: int, length: int, vocab_size: int) -> float:
    """Time per step: the difference of two runs, so that prefill does not count."""

    def run(tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts(batch, length, vocab_size), params, use_tqdm=False)
        return time.perf_counter() - begin

    run(8)  # captures the graph, fills the prefix cache
    few, many = run(8), run(72)
    return (many - few) / 64


def step_parts(directory: str, batch: int, length: int, vocab_size: int) -> tuple[float, float]:
    """(host seconds to launch a decode step, seconds that its kernels run), in one process."""
    from vllm_lite.worker.worker import Worker

    launched: list[float] = []
    launch = Worker.launch

    def timed(worker: Worker, plan: memoryview) -> object:
        begin = time.perf_counter()
        pending = launch(worker, plan)
        launched.append(time.perf_counter() - begin)
        return pending

    params = SamplingParams(temperature=0, max_tokens=34, ignore_eos=True)
    load = prompts(batch, length, vocab_size)
    with LLM(
        directory, load_format="dummy", device="cuda", max_model_len=8192, max_num_seqs=batch
    ) as llm:
        llm.generate(load, params, use_tqdm=False)
        Worker.launch = timed  # type: ignore[method-assign,assignment]
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                llm.generate(load, params, use_tqdm=False)
        finally:
            Worker.launch = launch  # type: ignore[method-assign]
    # The first steps, which compute the ends of the prompts, are few: the median is a decode's.
    kernels = sum(event.self_device_time_total for event in seen.key_averages()) * 1e-6
    return sorted(launched)[len(launched) // 2], kernels / len(launched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--batch", type=int, default=256)
    arguments = parser.parse_args()
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    for shape in arguments.shape or SHAPES:
        config = SHAPES[shape]
        vocab_size = int(config["vocab_size"])
        with tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory), shape)
            llm = LLM(
                directory, load_format="dummy", device="cuda", multiprocess=True,
                max_model_len=8192, max_num_seqs=arguments.batch,
            )  # fmt: skip
            with llm:
                head_dim, hidden = int(config["head_dim"]), int(config["hidden_size"])
                layers, kv_heads = int(config["num_hidden_layers"]), 8
                heads = int(config["num_attention_heads"])
                layer = hidden * head_dim * 2 * (heads + kv_heads)
                layer += 3 * hidden * int(config["intermediate_size"])
                weight_bytes = 2 * (layers * layer + vocab_size * hidden)
                decodes = []
                for batch, length in ((1, 512), (arguments.batch, 512)):
                    seconds = decode_seconds(llm, batch, length, vocab_size)
                    kv_bytes = 4 * layers * kv_heads * head_dim * batch * length
                    least = (weight_bytes + kv_bytes) / ceilings.copy_bandwidth
                    decodes.append((batch, length, seconds, least))
                count, length, out = 2 * arguments.batch, 1024, 128
                params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
                begin = time.perf_counter()
                llm.generate(prompts(count, length, vocab_size), params, use_tqdm=False)
                seconds = time.perf_counter() - begin
                report(
                    "end to end", f"{shape}, {count} prompts of {length} tokens, {out} out",
                    seconds, output_tokens_per_s=count * out / seconds,
                    total_tokens_per_s=count * (length + out) / seconds,
                )  # fmt: skip

            for batch, length, seconds, least in decodes:
                host, kernels = step_parts(directory, batch, length, vocab_size)
                report(
                    "end to end", f"{shape}, decode, batch {batch}, context {length}", seconds,
                    tokens_per_s=batch / seconds, bound_us=least * 1e6, share=least / seconds,
                    host_us=host * 1e6, gpu_idle_share=max(0.0, 1 - kernels / seconds),
                )  # fmt: skip


if __name__ == "__main__":
    main()
