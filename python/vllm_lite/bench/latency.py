"""Latency of one batch: seconds from its start to its last token, beside what memory and FLOPs
allow.
"""

import statistics
import time

from vllm_lite.arguments import add_engine_options, add_model, engine_config
from vllm_lite.bench import add_output, report
from vllm_lite.bench.throughput import LoadedEngine, positive, random_prompts
from vllm_lite.settings import Parser, add_config, add_to, read


def make_parser() -> Parser:
    parser = Parser(
        "vllm-lite bench latency", "Seconds that one batch takes, in this process.", "[MODEL]"
    )
    add_model(parser)
    add_config(parser)
    add = add_to(parser, "load", None)
    add("--batch-size", "prompts of a batch", type=positive, default=8, metavar="N")
    add("--input-len", "tokens of each", type=positive, default=32, metavar="N")
    add("--output-len", "tokens that each gets", type=positive, default=128, metavar="N")
    add("--num-iters", "batches that count", type=positive, default=5, metavar="N")
    add("--num-iters-warmup", "batches before them", type=positive, default=1, metavar="N")
    add("--seed", "of the prompts' token ids", type=int, default=0, metavar="N")
    add_output(parser)
    add_engine_options(parser)
    return parser


def main(argv: list[str]) -> int:
    values = read(make_parser(), argv).values
    config = engine_config(values)
    batch, input_len, output_len = (
        values["batch_size"],
        values["input_len"],
        values["output_len"],
    )
    engine = LoadedEngine(config, input_len + output_len)
    times = []
    for index in range(values["num_iters_warmup"] + values["num_iters"]):
        # Other prompts each time: none is to be found in the prefix cache.
        prompts = random_prompts(values["seed"] + index, batch, input_len, engine.model_config)
        start = time.perf_counter()
        engine.generate(prompts, output_len)
        times.append(time.perf_counter() - start)
    engine.close()
    times = times[values["num_iters_warmup"] :]

    decode_bound = engine.cost.decode_bound(engine.machine, batch, input_len + output_len / 2)
    prefill_seconds = batch * input_len / engine.cost.prefill_bound(engine.machine)
    bound_seconds = batch * output_len / decode_bound + prefill_seconds
    middle = statistics.median(times)
    figures = {
        "model": config.model,
        "dtype": engine.dtype,
        "batch_size": batch,
        "input_len": input_len,
        "output_len": output_len,
        "latencies_s": [round(seconds, 4) for seconds in times],
        "median_s": round(middle, 4),
        "min_s": round(min(times), 4),
        "max_s": round(max(times), 4),
        "bound_s": round(bound_seconds, 4),
        "share_of_bound": round(bound_seconds / middle, 3),
        **engine.machine_figures(),
    }
    text = (
        f"{batch} prompts of {input_len} tokens, {output_len} out, {engine.dtype}: median "
        f"{middle:.3f} s, {min(times):.3f} to {max(times):.3f} s in {len(times)} runs "
        f"({1000 * middle / output_len:.2f} ms per token)\n"
        f"bound {bound_seconds:.3f} s at {figures['read_bandwidth_gb_s']} GB/s and "
        f"{figures['gemm_gflop_s']} GFLOP/s measured: {figures['share_of_bound']:.0%} reached"
    )
    report(figures, text, values["output_json"])
    return 0
