"""Load on a running server: Poisson arrivals, streamed completions, percentiles of TTFT and ITL.

The figures stand beside the decode bound of this machine and the server's model, so the benchmark
runs on the machine of the server.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from vllm_lite.bench import add_output, report
from vllm_lite.bench.client import HttpError, Server
from vllm_lite.bench.throughput import positive
from vllm_lite.config import EngineConfig
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import find_model
from vllm_lite.settings import Parser, add_config, add_to, read


@dataclass(frozen=True)
class Request:
    """Greedy, and exactly ``max_tokens`` are generated: end-of-text tokens count for nothing."""

    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0  # seconds after the beginning


async def one_request(server: Server, model: str, request: Request) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    try:
        async for event in server.events("/v1/completions", body):
            if event["choices"]:
                arrivals.append(time.perf_counter())
            if event.get("usage"):  # in a last event without choices, llama.cpp: in the last one
                usage = event["usage"]
    except (HttpError, OSError) as error:
        return {"error": str(error) or type(error).__name__}
    if not arrivals or not usage:
        return {"error": "the stream had no output or no usage"}
    return {
        "input_tokens": len(request.prompt),
        "output_tokens": usage["completion_tokens"],
        "ttft": arrivals[0] - start,
        "itl": [later - earlier for earlier, later in pairwise(arrivals)],
        "e2e": arrivals[-1] - start,
    }


async def send(
    url: str,
    requests: Sequence[Request],
    api_key: str | None = None,
    model: str | None = None,
    max_concurrency: int | None = None,
    progress: bool = False,
) -> tuple[list[dict[str, Any]], float]:
    """Sends each request at its arrival, ``max_concurrency`` at once; their results in order, and
    the seconds in all.
    """
    server = Server(url, api_key)
    if model is None:
        model = (await server.get("/v1/models"))["data"][0]["id"]
    room = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    bar = tqdm(total=len(requests), unit="request", dynamic_ncols=True, disable=not progress)
    start = time.perf_counter()

    async def counted(request: Request) -> dict[str, Any]:
        await asyncio.sleep(start + request.arrival - time.perf_counter())
        async with room:
            result = await one_request(server, model, request)
        bar.update()
        return result

    results = await asyncio.gather(*map(counted, requests))
    seconds = time.perf_counter() - start
    bar.close()
    return list(results), seconds


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    if len(values) < 2:
        values = values * 2 or [float("nan")] * 2
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{p}": round(1000 * cuts[p - 1], 2) for p in (50, 90, 99)}


def make_parser() -> Parser:
    parser = Parser(
        "vllm-lite bench serve", "TTFT, ITL and tokens/s of a running server under load."
    )
    add_config(parser)
    add = add_to(parser, "server", None)
    add("--url", "of the server", "--base-url", default="http://127.0.0.1:8000")
    add("--api-key", "that the server asks for", metavar="KEY")
    add("--model", "name to ask for (default: the server's first)", metavar="NAME")
    add("--model-path", "the served model on this machine, for its vocabulary and the bound "
        "(default: as the server names it)", metavar="MODEL")  # fmt: skip
    add("--dtype", "the server's, for the bound", default="auto",
        choices=["auto", "float32", "bfloat16", "float16"])  # fmt: skip
    add = add_to(parser, "load", None)
    add("--num-prompts", "requests in all", type=positive, default=32,
        metavar="N")  # fmt: skip
    add("--request-rate", "requests/s, with random gaps; inf: all at once", type=_rate,
        default=math.inf, metavar="RATE")  # fmt: skip
    add("--max-concurrency", "requests under way at most (default: no limit)", type=positive,
        metavar="N")  # fmt: skip
    add("--input-len", "tokens of a prompt: one number, or LOW-HIGH", type=_range,
        default="64-256", metavar="TOKENS")  # fmt: skip
    add("--output-len", "tokens that it gets: one number, or LOW-HIGH", type=_range,
        default="32-128", metavar="TOKENS")  # fmt: skip
    add("--seed", "of token ids, lengths and gaps", type=int, default=0, metavar="N")
    add_output(parser)
    return parser


def main(argv: list[str]) -> int:
    import torch

    from vllm_lite.bench.bounds import ModelCost, measure_machine

    values = read(make_parser(), argv).values
    url, api_key = values["url"], values["api_key"]
    card = asyncio.run(_card(Server(url, api_key), values["model"]))
    path = values["model_path"] or card["root"]
    config = load_model_config(find_model(path))
    dtype = EngineConfig(model=path, dtype=values["dtype"]).resolve(config).dtype
    cost = ModelCost.of(config, dtype)
    machine = measure_machine(getattr(torch, dtype))
    results, seconds = asyncio.run(
        send(
            url,
            _random_requests(values, config.vocab_size),
            api_key,
            card["id"],
            values["max_concurrency"],
            progress=values["output_json"] != "-",
        )
    )

    good = [result for result in results if "error" not in result]
    errors = [result["error"] for result in results if "error" in result]
    busy = sum(result["e2e"] for result in good) / seconds  # requests in flight on average
    context = statistics.mean(
        result["input_tokens"] + result["output_tokens"] / 2 for result in good
    ) if good else 0.0  # fmt: skip
    bound = cost.decode_bound(machine, max(1, round(busy)), context)
    output_tokens = sum(result["output_tokens"] for result in good)
    summary = {
        "model": card["id"],
        "requests": len(good),
        "errors": len(errors),
        "request_rate": None if math.isinf(values["request_rate"]) else values["request_rate"],
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "ttft_ms": percentiles([result["ttft"] for result in good]),
        "itl_ms": percentiles([gap for result in good for gap in result["itl"]]),
        "mean_in_flight": round(busy, 2),
        "decode_bound_tokens_per_s": round(bound, 1),
        "read_bandwidth_gb_s": round(machine.read_bandwidth / 1e9, 1),
        "gemm_gflop_s": round(machine.flops / 1e9, 1),
    }
    report({**summary, "results": results}, json.dumps(summary, indent=2), values["output_json"])
    if errors:
        raise ValueError(f"{len(errors)} requests failed, the first with: {errors[0]}")
    return 0


async def _card(server: Server, model: str | None) -> dict[str, Any]:
    """Of the model that is asked for, or of the server's first."""
    try:
        cards: list[dict[str, Any]] = (await server.get("/v1/models"))["data"]
    except HttpError as error:
        raise ValueError(f"/v1/models: {error}") from None
    for card in cards:
        if model in (None, card["id"]):
            return card
    names = ", ".join(card["id"] for card in cards)
    raise ValueError(f"model {model!r} is not served there; served: {names}")


def _random_requests(values: dict[str, Any], vocab_size: int) -> list[Request]:
    source = random.Random(values["seed"])
    requests, arrival = [], 0.0
    for _ in range(values["num_prompts"]):
        length = source.randint(*values["input_len"])
        prompt = [source.randrange(vocab_size) for _ in range(length)]
        requests.append(Request(prompt, source.randint(*values["output_len"]), arrival))
        arrival += source.expovariate(values["request_rate"])
    return requests


def _range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    first = positive(low)
    last = positive(high) if dash else first
    if last < first:
        raise argparse.ArgumentTypeError(f"the higher number comes first in {text!r}")
    return first, last


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, or inf; got {text!r}")
    return value
