"""Offline throughput: how many output tokens per second, beside what memory and FLOPs allow.

    python bench/throughput.py --num-prompts 32 --input-len 128 --output-len 64

Prompts are random token ids with a fixed seed, output lengths exact (ignore_eos). The bound is the
time in which the weights are read once per decode step and the KV of every sequence with them, or
in which the FLOPs are done if that is longer, plus the prompts' FLOPs.
"""

import argparse
import json
import random
import time

import torch

from bounds import ModelCost, measure_machine
from vllm_lite import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of text")
    args = parser.parse_args()

    llm = LLM(args.model, dtype=args.dtype, max_num_seqs=args.max_num_seqs,
              max_model_len=args.input_len + args.output_len)  # fmt: skip
    config = llm.engine.model_config
    dtype = llm.engine.config.resolve(config).dtype
    machine = measure_machine(getattr(torch, dtype))
    cost = ModelCost.of(config, dtype)
    source = random.Random(args.seed)
    prompts = [
        [source.randrange(config.vocab_size) for _ in range(args.input_len)]
        for _ in range(args.num_prompts)
    ]
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)  # warm up
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=not args.json)
    seconds = time.perf_counter() - start
    llm.close()

    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_input = args.num_prompts * args.input_len
    batch = min(args.num_prompts, args.max_num_seqs)
    decode_bound = cost.decode_bound(machine, batch, args.input_len + args.output_len / 2)
    bound_seconds = num_output / decode_bound + num_input / cost.prefill_bound(machine)
    result = {
        "model": args.model,
        "dtype": dtype,
        "num_prompts": args.num_prompts,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "total_tokens_per_s": round((num_output + num_input) / seconds, 1),
        "bound_output_tokens_per_s": round(num_output / bound_seconds, 1),
        "share_of_bound": round(bound_seconds / seconds, 3),
        "read_bandwidth_gb_s": round(machine.read_bandwidth / 1e9, 1),
        "gemm_gflop_s": round(machine.flops / 1e9, 1),
        "weight_mb": round(cost.weight_bytes / 1e6, 1),
    }
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{args.num_prompts} prompts of {args.input_len} tokens, {args.output_len} out, {dtype}: "
        f"{result['output_tokens_per_s']} output tokens/s ({seconds:.2f} s)\n"
        f"bound {result['bound_output_tokens_per_s']} tokens/s at {result['read_bandwidth_gb_s']} "
        f"GB/s and {result['gemm_gflop_s']} GFLOP/s measured: "
        f"{result['share_of_bound']:.0%} reached"
    )


if __name__ == "__main__":
    main()
