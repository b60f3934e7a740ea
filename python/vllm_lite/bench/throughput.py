"""Offline throughput: how many output tokens per second, beside what memory and FLOPs allow.

Prompts are random token ids with a fixed seed, output lengths exact (ignore_eos). The bound is the
time in which the weights are read once per decode step and the KV of every sequence with them, or
in which the FLOPs are done if that is longer, plus the prompts' FLOPs.
"""

import argparse
import random
import time
from typing import Any

from vllm_lite.arguments import add_engine_options, add_model, engine_config
from vllm_lite.bench import add_output, report
from vllm_lite.config import EngineConfig
from vllm_lite.model_config import ModelConfig
from vllm_lite.settings import Parser, add_config, add_to, read


def make_parser() -> Parser:
    parser = Parser(
        "vllm-lite bench throughput",
        "Output tokens/s of many prompts at once, in this process.",
        "[MODEL]",
    )
    add_model(parser)
    add_config(parser)
    add = add_to(parser, "load", None)
    add(
        "--num-prompts",
        "prompts, all there from the beginning",
        type=positive,
        default=32,
        metavar="N",
    )
    add("--input-len", "tokens of each", type=positive, default=128, metavar="N")
    add("--output-len", "tokens that each gets", type=positive, default=64, metavar="N")
    add("--seed", "of the prompts' token ids", type=int, default=0, metavar="N")
    add_output(parser)
    add_engine_options(parser)
    return parser


def main(argv: list[str]) -> int:
    values = read(make_parser(), argv).values
    config = engine_config(values)
    num_prompts, input_len, output_len = (
        values["num_prompts"],
        values["input_len"],
        values["output_len"],
    )
    engine = LoadedEngine(config, input_len + output_len)
    prompts = random_prompts(values["seed"], num_prompts, input_len, engine.model_config)
    engine.generate(prompts[:1], min(2, output_len))  # warm up
    start = time.perf_counter()
    num_output = engine.generate(prompts, output_len, progress=values["output_json"] != "-")
    seconds = time.perf_counter() - start
    engine.close()

    num_input = num_prompts * input_len
    batch = min(num_prompts, config.max_num_seqs)
    decode_bound = engine.cost.decode_bound(engine.machine, batch, input_len + output_len / 2)
    prefill_seconds = num_input / engine.cost.prefill_bound(engine.machine)
    bound_seconds = num_output / decode_bound + prefill_seconds
    figures = {
        "model": config.model,
        "dtype": engine.dtype,
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "total_tokens_per_s": round((num_output + num_input) / seconds, 1),
        "bound_output_tokens_per_s": round(num_output / bound_seconds, 1),
        "share_of_bound": round(bound_seconds / seconds, 3),
        **engine.machine_figures(),
    }
    text = (
        f"{num_prompts} prompts of {input_len} tokens, {output_len} out, {engine.dtype}: "
        f"{figures['output_tokens_per_s']} output tokens/s ({seconds:.2f} s)\n"
        f"bound {figures['bound_output_tokens_per_s']} tokens/s at "
        f"{figures['read_bandwidth_gb_s']} GB/s and {figures['gemm_gflop_s']} GFLOP/s measured: "
        f"{figures['share_of_bound']:.0%} reached"
    )
    report(figures, text, values["output_json"])
    return 0


class LoadedEngine:
    """An ``LLM`` for exact lengths, with what bounds it on this machine."""

    def __init__(self, config: EngineConfig, length: int) -> None:
        """``length``: tokens of the longest request, prompt and output."""
        import torch

        from vllm_lite.bench.bounds import ModelCost, measure_machine
        from vllm_lite.llm import LLM

        config.max_model_len = config.max_model_len or length
        self._llm = LLM(**{name: getattr(config, name) for name in config.__struct_fields__})
        self.model_config = self._llm.engine.model_config
        self.dtype = config.resolve(self.model_config).dtype
        self.machine = measure_machine(getattr(torch, self.dtype))
        self.cost = ModelCost.of(self.model_config, self.dtype)

    def generate(self, prompts: list[list[int]], output_len: int, progress: bool = False) -> int:
        """The number of tokens generated."""
        from vllm_lite.sampling_params import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        outputs = self._llm.generate(prompts, params, use_tqdm=progress)
        for output in outputs:
            if output.error is not None:
                raise ValueError(output.error)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def machine_figures(self) -> dict[str, Any]:
        return {
            "read_bandwidth_gb_s": round(self.machine.read_bandwidth / 1e9, 1),
            "gemm_gflop_s": round(self.machine.flops / 1e9, 1),
            "weight_mb": round(self.cost.weight_bytes / 1e6, 1),
        }

    def close(self) -> None:
        self._llm.close()


def random_prompts(seed: int, count: int, length: int, model: ModelConfig) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(model.vocab_size) for _ in range(length)] for _ in range(count)]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)
