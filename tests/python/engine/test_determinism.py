"""The determinism contract of the CPU: a request's tokens and logprobs are equal in every bit
whatever else runs, however its prompt is cut, whatever the cache holds, and if it is preempted.

    pytest -m slow tests/python/engine/test_determinism.py      every combination, everywhere

Without -m slow: every combination in bfloat16 on the best instruction set, and for the other
weights, an int8 KV cache and the other instruction sets some of each.
"""

import json
import random
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer

from checkpoints import make_model
from loader.test_gguf_model import write_gguf
from tiny_model import EOS, VOCAB_SIZE, make_tiny_model
from vllm_lite import LLM, SamplingParams, ops

WEIGHTS = ("bfloat16", "int8", "Q4_1", "bfloat16, int8 KV")
BATCHES = ("alone", 2, 17, 64, "random")
CHUNKS = (0, 1, 7, 64)  # 0: whole prompts
CACHES = ("cold", "hit", "partial hit")
POOLS = ("roomy", "preempting")
COMBINATIONS = list(product(BATCHES, CACHES))
BLOCK_SIZE = 16
MAX_TOKENS = 12
MAX_LEN = 96
SMALL_POOL_BLOCKS = 24  # of which a request takes up to 6
# Of half the engines. Most of what it guesses of such outputs is wrong.
SPECULATIVE = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
}  # fmt: skip

Prompt = list[int]
Result = list[tuple[int, dict[int, float]]]


def random_prompt(source: random.Random, length: int) -> Prompt:
    return [source.randrange(2, VOCAB_SIZE - 40) for _ in range(length)]


PROBES = [random_prompt(random.Random(length), length) for length in (5, 37, 70)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2),
    SamplingParams(
        temperature=0.9, top_p=0.8, seed=7, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2
    ),
]
REQUESTS = list(product(PROBES, PARAMS))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """weights -> (model, options)"""
    directory = tmp_path_factory.mktemp("determinism")
    tiny = make_tiny_model(directory / "tiny")
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(i) or f"[unused {i}]" for i in range(VOCAB_SIZE)]

    def add_tokenizer(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3] + [1] * (VOCAB_SIZE - 2))
        writer.add_token_merges([" ".join(pair) for pair in merges])

    # Q4_1 has blocks of 32 columns, and every matrix whole ones.
    model = make_model(
        "llama", vocab_size=VOCAB_SIZE, max_position_embeddings=128, num_hidden_layers=2,
        eos_token_id=EOS, bos_token_id=0,
    )  # fmt: skip
    path: Path = directory / "tiny.gguf"
    write_gguf(path, model, GGMLQuantizationType.Q4_1, extra=add_tokenizer)
    return {
        "bfloat16": (str(tiny), {}),
        "int8": (str(tiny), {"quantization": "int8"}),
        "Q4_1": (str(path), {}),
        "bfloat16, int8 KV": (str(tiny), {"kv_cache_dtype": "int8"}),
    }


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = ops.current_cpu_isa()
    ops.set_cpu_isa(request.param)
    yield request.param
    ops.set_cpu_isa(before)


class Engine:
    """An engine with one way of cutting prompts and one pool."""

    def __init__(self, model: str, options: dict[str, Any], chunk: int, pool: str) -> None:
        row_bytes = 64 + 4 if "kv_cache_dtype" in options else 64 * torch.bfloat16.itemsize
        block_bytes = 2 * 2 * 1 * BLOCK_SIZE * row_bytes
        blocks = SMALL_POOL_BLOCKS if pool == "preempting" else 4096
        self.llm = LLM(
            model, dtype="bfloat16", max_model_len=MAX_LEN, num_threads=2, block_size=BLOCK_SIZE,
            max_chunk_tokens=chunk, kv_cache_memory=blocks * block_bytes, max_num_seqs=64,
            **options,
        )  # fmt: skip
        self._salts = count()

    def run(self, batch: str | int, cache: str) -> list[Result]:
        """The results of REQUESTS."""
        salt = f"{next(self._salts)}"
        if cache != "cold":
            shared = [p if cache == "hit" else [*p[: len(p) * 2 // 3], 3, 4, 5] for p in PROBES]
            one = SamplingParams(temperature=0, max_tokens=1)
            self._generate([(prompt, one) for prompt in shared], salt)
        source = random.Random(f"{batch} {cache}")
        if batch == "alone":
            return [self._generate([request], salt)[0] for request in REQUESTS]
        if batch == 2:
            return [
                self._generate([request, self._neighbour(source)], salt)[0] for request in REQUESTS
            ]
        size = batch if isinstance(batch, int) else source.randrange(20, 50)
        together = REQUESTS + [
            self._neighbour(source, varied=batch == "random") for _ in range(size - len(REQUESTS))
        ]
        order = list(range(size))
        source.shuffle(order)
        found = self._generate([together[i] for i in order], salt)
        return [found[order.index(i)] for i in range(len(REQUESTS))]

    def _neighbour(
        self, source: random.Random, varied: bool = False
    ) -> tuple[Prompt, SamplingParams]:
        if not varied:
            return random_prompt(source, source.randrange(10, 60)), PARAMS[0]
        params = SamplingParams(
            temperature=source.choice([0, 0.5, 1.5]),
            top_k=source.choice([0, 3]),
            repetition_penalty=source.choice([1.0, 1.3]),
            seed=source.randrange(100),
            max_tokens=source.randrange(1, 20),
        )
        return random_prompt(source, source.randrange(1, 70)), params

    def _generate(self, requests: list[tuple[Prompt, SamplingParams]], salt: str) -> list[Result]:
        prompts = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt, _ in requests]
        outputs = self.llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
        found = []
        for output in outputs:
            sample = output.outputs[0]
            logprobs = sample.logprobs or [{}] * len(sample.token_ids)
            found.append(
                [
                    (token, {id: value.logprob for id, value in here.items()})
                    for token, here in zip(sample.token_ids, logprobs, strict=True)
                ]
            )
        return found


def check(model: str, options: dict[str, Any], share: int) -> None:
    """Every combination; with ``share`` n, an n-th of them for each chunk and pool."""
    expected: list[Result] | None = None
    preemptions = drafts = 0
    for index, (chunk, pool) in enumerate(product(CHUNKS, POOLS)):
        speculative = SPECULATIVE if (index + index // 2) % 2 else {}
        engine = Engine(model, options | speculative, chunk, pool)
        with engine.llm:
            if expected is None:
                expected = engine.run("alone", "cold")
                assert len({str(result) for result in expected}) == len(REQUESTS)
            for batch, cache in COMBINATIONS[index % share :: share]:
                assert engine.run(batch, cache) == expected, (chunk, pool, batch, cache)
            stats = engine.llm.engine.stats()
        preemptions += stats.num_preemptions
        drafts += stats.num_draft_tokens
        assert (stats.num_preemptions > 0) <= (pool == "preempting")
        assert (stats.num_draft_tokens > 0) <= bool(speculative)
    assert preemptions > 0 and drafts > 0


def cases() -> list[Any]:
    """(isa, weights, share): all of bfloat16 on the best instruction set, some of the others."""
    best = ops.cpu_isas()[-1]
    return [
        pytest.param(isa, weights, 1 if (isa, weights) == (best, "bfloat16") else 8)
        for isa, weights in product(ops.cpu_isas(), WEIGHTS)
    ]


@pytest.mark.case("BIV-01", "SED-01", "PFX-05")
@pytest.mark.parametrize(("isa", "weights", "share"), cases(), indirect=["isa"])
def test_a_request_has_the_same_bits_in_every_company(
    isa: str, weights: str, share: int, models: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    check(*models[weights], share)


@pytest.mark.case("BIV-01")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_output_does_not_depend_on_how_many_run_or_on_the_place(
    dtype: str, models: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    def run(prompts: list[Prompt]) -> list[Any]:
        outputs = llm.generate(prompts, PARAMS[0], use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    source = random.Random(1)
    probe = random_prompt(source, 30)
    with LLM(models["bfloat16"][0], dtype=dtype, max_model_len=MAX_LEN, num_threads=2) as llm:
        (alone,) = run([probe])
        for num_others in (2, 7, 16):
            others = [random_prompt(source, source.randrange(5, 60)) for _ in range(num_others)]
            assert run([probe, *others])[0] == alone
            assert run([*others, probe])[-1] == alone


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("isa", ops.cpu_isas(), indirect=True)
def test_every_combination(
    isa: str, weights: str, models: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    check(*models[weights], 1)
