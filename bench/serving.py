"""Load on a running server: Poisson arrivals, streamed completions, percentiles of TTFT and ITL.

    vllm-lite serve &  python bench/serving.py --rate 2 --num-requests 32

Prints a progress bar, then the figures beside the decode bound of the machine and model (both must
be those of the server: run it on the same machine). ``--output`` appends one JSON line per request
and one for the whole run.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
from tqdm import tqdm

from bounds import ModelCost, measure_machine
from vllm_lite.config import EngineConfig
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import find_model
from workloads import Request


async def one_request(
    client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int
) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode()
            return {"error": f"{response.status_code}: {text[:200]}"}
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return {"error": event["error"]["message"]}
            if event["choices"]:
                arrivals.append(time.perf_counter())
            if event.get("usage"):  # in a last event without choices, llama.cpp: in the last one
                usage = event["usage"]
    return {
        "input_tokens": len(prompt),
        "output_tokens": usage["completion_tokens"],
        "ttft": arrivals[0] - start,
        "itl": [later - earlier for earlier, later in pairwise(arrivals)],
        "e2e": arrivals[-1] - start,
    }


async def send(
    url: str, requests: Sequence[Request], api_key: str = "", progress: bool = False
) -> tuple[list[dict[str, Any]], float]:
    """Sends each request at its arrival; their results in order, and the seconds in all."""
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=limits, headers=headers
    ) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        model = models["data"][0]["id"]
        bar = tqdm(total=len(requests), unit="request", dynamic_ncols=True, disable=not progress)
        start = time.perf_counter()

        async def counted(request: Request) -> dict[str, Any]:
            await asyncio.sleep(start + request.arrival - time.perf_counter())
            result = await one_request(client, model, request.prompt, request.max_tokens)
            bar.update()
            return result

        results = await asyncio.gather(*map(counted, requests))
        seconds = time.perf_counter() - start
        bar.close()
    return list(results), seconds


def random_requests(args: argparse.Namespace, vocab_size: int) -> list[Request]:
    source = random.Random(args.seed)
    requests, arrival = [], 0.0
    for _ in range(args.num_requests):
        length = source.randint(*args.input_len)
        prompt = [source.randrange(vocab_size) for _ in range(length)]
        requests.append(Request(prompt, source.randint(*args.output_len), arrival))
        arrival += source.expovariate(args.rate) if args.rate else 0.0
    return requests


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    if len(values) < 2:
        values = values * 2 or [float("nan")] * 2
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{p}": round(1000 * cuts[p - 1], 2) for p in (50, 90, 99)}


def length_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--model", default="smollm2", help="the model served, for the bounds")
    parser.add_argument("--dtype", default="auto", help="the server's, for the bounds")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s; 0: all at once")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--input-len", type=length_range, default=(64, 256), metavar="LOW-HIGH")
    parser.add_argument("--output-len", type=length_range, default=(32, 128), metavar="LOW-HIGH")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()

    config = load_model_config(find_model(args.model))
    dtype = EngineConfig(model=args.model, dtype=args.dtype).resolve(config).dtype
    cost = ModelCost.of(config, dtype)
    machine = measure_machine(getattr(torch, dtype))
    requests = random_requests(args, config.vocab_size)
    results, seconds = asyncio.run(send(args.url, requests, args.api_key, progress=True))

    good = [result for result in results if "error" not in result]
    errors = [result["error"] for result in results if "error" in result]
    output_tokens = sum(result["output_tokens"] for result in good)
    busy = sum(result["e2e"] for result in good) / seconds  # requests in flight on average
    context = statistics.mean(
        result["input_tokens"] + result["output_tokens"] / 2 for result in good
    ) if good else 0.0  # fmt: skip
    bound = cost.decode_bound(machine, max(1, round(busy)), context)
    summary = {
        "requests": len(good),
        "errors": len(errors),
        "rate": args.rate,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "ttft_ms": percentiles([result["ttft"] for result in good]),
        "itl_ms": percentiles([gap for result in good for gap in result["itl"]]),
        "mean_in_flight": round(busy, 2),
        "decode_bound_tokens_per_s": round(bound, 1),
        "read_bandwidth_gb_s": round(machine.read_bandwidth / 1e9, 1),
        "gemm_gflop_s": round(machine.flops / 1e9, 1),
    }
    if args.output:
        with args.output.open("a") as file:
            for result in results:
                file.write(json.dumps(result) + "\n")
            file.write(json.dumps({"summary": summary}) + "\n")
    print(json.dumps(summary, indent=2))
    if errors:
        raise SystemExit(f"{len(errors)} requests failed, the first with: {errors[0]}")


if __name__ == "__main__":
    main()
