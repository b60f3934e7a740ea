"""Requests of every kind leave no block, row or place in the queue behind."""

import random
from typing import Any

import pytest

from engine.calls import PROMPTS, ascii_ids
from tiny_model import EOS, block_bytes
from vllm_lite import LLM, PoolingParams, SamplingParams, StructuredOutputsParams

NUM_REQUESTS = 400


@pytest.mark.case("KVA-01")
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_hundreds_of_requests_of_every_kind_leave_nothing(
    tiny_model: str, prefix_caching: bool
) -> None:
    """In a pool so small that some are preempted."""
    source = random.Random(3)
    with LLM(
        tiny_model, num_threads=1, max_num_seqs=12, max_num_waiting=32, max_model_len=96,
        kv_cache_memory=14 * block_bytes(), enable_prefix_caching=prefix_caching,
    ) as llm:  # fmt: skip
        letters = ascii_ids(llm)
        digits = StructuredOutputsParams(regex="[0-9]{3,9}")
        call = StructuredOutputsParams(json={"type": "object", "maxProperties": 2})
        kinds: list[dict[str, Any]] = [
            {"max_tokens": 9, "ignore_eos": True},
            {"max_tokens": 30, "stop": ["a", "e"], "allowed_token_ids": letters},
            {"max_tokens": 30, "logit_bias": {EOS: 8}},
            {"max_tokens": 12, "n": 4, "ignore_eos": True},
            {"max_tokens": 12, "n": 2, "best_of": 4},
            {"max_tokens": 8, "n": 3, "use_beam_search": True},
            {"max_tokens": 20, "structured_outputs": digits},
            {"max_tokens": 40, "structured_outputs": call, "n": 2},
            {"max_tokens": 0, "prompt_logprobs": 2},
            # No token is left: its rows fail.
            {"max_tokens": 9, "structured_outputs": digits, "allowed_token_ids": letters[-3:]},
        ]
        engine, reasons, begun = llm.engine, dict[str, int](), 0
        while begun < NUM_REQUESTS or engine.has_unfinished_requests():
            while begun < NUM_REQUESTS and engine.get_num_unfinished_requests() < 8:
                kind = source.randrange(len(kinds) + 1)
                prompt = source.choice(PROMPTS) * source.randrange(1, 6)
                params = PoolingParams() if kind == len(kinds) else SamplingParams(**kinds[kind])
                if isinstance(params, SamplingParams):
                    params.seed = begun
                engine.add_request(str(begun), prompt, params)
                begun += 1
                if source.random() < 0.1:
                    engine.abort_request(str(source.randrange(begun)))
            for output in engine.step():
                if output.finished:
                    samples = output.outputs if isinstance(output.outputs, list) else []
                    for reason in {str(sample.finish_reason) for sample in samples}:
                        reasons[reason] = reasons.get(reason, 0) + 1
        assert {"stop", "length", "error"} <= reasons.keys(), reasons
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)
        assert stats.num_preemptions > 0
        # Nor are rows gone: as many run at once as at the beginning.
        free = SamplingParams(max_tokens=3, n=12, ignore_eos=True)
        assert len(llm.generate("a", free, use_tqdm=False)[0].outputs) == 12
