"""The CPU workloads W1 to W5: the same token ids, lengths and arrivals for every engine and run."""

import random
from dataclasses import dataclass, replace

from vllm_lite.bench.serve import Request

VOCAB_SIZE = 49152  # of SmolLM2 and of the 1.1B shape
FIRST_ID = 100  # SmolLM2's special tokens are below

SMOLLM2 = "smollm2"
LLAMA_1B = "llama-1b"
# A 1.1B Llama with random weights, as fields of a Hugging Face config.json.
LLAMA_1B_SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    model: str
    requests: list[Request]
    rate: float | None = None  # requests/s over HTTP, streamed; None: offline, all at once

    @property
    def output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)


def all_workloads(smoke: bool = False) -> list[Workload]:
    """``smoke``: a few requests of a few tokens, to see that everything runs."""
    workloads = [
        _offline("W1", "64 requests, 32-512 in, 128 out", SMOLLM2, 64, (32, 512), 128),
        _offline("W2", "1 request, 128 in, 256 out", SMOLLM2, 1, (128, 128), 256),
        *(_serving(f"W3 {rate}/s", rate) for rate in (1, 2, 4)),
        _shared_prefix(),
        _offline("W5 offline", "1.1B: 16 requests, 32-512 in, 64 out", LLAMA_1B, 16, (32, 512), 64),
        _offline("W5 single", "1.1B: 1 request, 128 in, 256 out", LLAMA_1B, 1, (128, 128), 256),
    ]
    return [_smaller(workload) for workload in workloads] if smoke else workloads


def _tokens(source: random.Random, length: int) -> list[int]:
    return [source.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(length)]


def _offline(
    name: str, title: str, model: str, num_requests: int, input_len: tuple[int, int], output: int
) -> Workload:
    source = random.Random(name)
    requests = [
        Request(_tokens(source, source.randint(*input_len)), output) for _ in range(num_requests)
    ]
    return Workload(name, title, model, requests)


def _serving(name: str, rate: float) -> Workload:
    source = random.Random(name)
    gaps = [source.expovariate(1.0) for _ in range(99)]
    # So few draws can be a third off the rate; it is the rate that the table names.
    scale = len(gaps) / rate / sum(gaps)
    requests, arrival = [], 0.0
    for gap in [0.0, *gaps]:
        arrival += gap * scale
        prompt = _tokens(source, source.randint(64, 256))
        requests.append(Request(prompt, source.randint(32, 128), arrival))
    title = f"100 requests, Poisson {rate}/s, 64-256 in, 32-128 out"
    return Workload(name, title, SMOLLM2, requests, rate)


def _shared_prefix() -> Workload:
    source = random.Random("W4")
    prefix = _tokens(source, 1024)
    requests = [Request(prefix + _tokens(source, 32), 32) for _ in range(64)]
    return Workload("W4", "64 requests, 1,024 in common + 32 own, 32 out", SMOLLM2, requests)


def _smaller(workload: Workload) -> Workload:
    requests = [
        replace(request, max_tokens=4, arrival=request.arrival / 10)
        for request in workload.requests[:3]
    ]
    return replace(workload, requests=requests)
