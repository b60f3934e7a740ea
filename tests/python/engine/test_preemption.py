"""Too little room for all that run, and a flood of prompts: nobody loses, doubles or waits for a
token.
"""

import random

import numpy as np
import pytest

from tiny_model import VOCAB_SIZE, block_bytes
from vllm_lite import (
    CompletionOutput,
    Engine,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from vllm_lite.worker.step_plan import NEW_ROW, StepPlan
from vllm_lite.worker.worker import Worker

MAX_TOKENS = 40


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(2, VOCAB_SIZE) for _ in range(length)]


PROMPTS = [random_prompt(random.Random(length), length) for length in (5, 9, 13, 20, 37, 90)]


def params(index: int) -> SamplingParams:
    """Greedy and sampled in turn; the seed tells the requests apart in the step plans."""
    return SamplingParams(
        temperature=index % 2, seed=index, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2,
        repetition_penalty=1.1, output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip


class Run:
    """The outputs of PROMPTS, and of each how many tokens it had given whenever it got a row."""

    def __init__(
        self, engine: Engine, priorities: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.parts: list[list[CompletionOutput]] = [[] for _ in PROMPTS]
        self.last: list[RequestOutput | None] = [None] * len(PROMPTS)
        self.tokens_at_rows: list[list[int]] = [[] for _ in PROMPTS]
        launch = Worker.launch

        def watching(worker: Worker, plan: memoryview) -> object:
            step = StepPlan(plan)
            words = np.ascontiguousarray(step.split_changes(step.changes).new_rows.numpy())
            for row in words.view(NEW_ROW).reshape(-1):
                index = int(row["seed"][0])
                self.tokens_at_rows[index].append(len(self.token_ids(index)))
            return launch(worker, plan)

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "launch", watching)
            for index, prompt in enumerate(PROMPTS):
                engine.add_request(str(index), prompt, params(index), priorities[index])
            while engine.has_unfinished_requests():
                for output in engine.step():
                    index = int(output.request_id)
                    self.parts[index] += output.outputs
                    self.last[index] = output

    def token_ids(self, index: int) -> list[int]:
        return [token for part in self.parts[index] for token in part.token_ids]

    def result(self, index: int) -> tuple[object, ...]:
        """All that the request's user sees of it, however it was cut into outputs."""
        parts, last = self.parts[index], self.last[index]
        assert last is not None and last.finished and last.error is None
        return (
            self.token_ids(index),
            "".join(part.text for part in parts),
            [entry for part in parts for entry in part.logprobs or ()],
            [part.finish_reason for part in parts if part.finish_reason],
            parts[-1].cumulative_logprob,
            (len(last.prompt_token_ids), last.num_cached_tokens),
        )


@pytest.mark.case("SCH-05", "USG-06")
def test_preempted_requests_give_what_they_give_in_a_roomy_pool(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is preempted, one of them while its prompt is computed in chunks."""
    indices = range(len(PROMPTS))
    with LLMEngine(tiny_model, num_threads=1, enable_prefix_caching=False) as roomy:
        expected = Run(roomy, [0] * 6, monkeypatch)
    assert [len(rows) for rows in expected.tokens_at_rows] == [1] * 6
    for index in indices:
        assert len(expected.token_ids(index)) == MAX_TOKENS
    preempted_at: list[list[int]] = [[] for _ in PROMPTS]
    for turn in indices:
        # A new engine, so that no prompt is cached; 16 blocks, of which the last takes 9.
        with LLMEngine(
            tiny_model, num_threads=1, max_model_len=160, max_chunk_tokens=4,
            kv_cache_memory=16 * block_bytes(), scheduling_policy="priority",
        ) as engine:  # fmt: skip
            run = Run(engine, [(index + turn) % 6 for index in indices], monkeypatch)
            stats = engine.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)
        for index in indices:
            assert run.result(index) == expected.result(index), (turn, index)
            preempted_at[index] += run.tokens_at_rows[index][1:]
    assert all(preempted_at), preempted_at
    assert any(0 in tokens for tokens in preempted_at)
    assert sum(max(tokens) > MAX_TOKENS // 4 for tokens in preempted_at) >= 3


@pytest.mark.case("SCH-01")
def test_a_flood_of_prompts_holds_up_neither_a_stream_nor_the_earlier_prompts(
    tiny_model: str,
) -> None:
    source = random.Random(1)
    num_steps, length, budget, answer = 200, 500, 128, 4
    first_token: dict[str, int] = {}
    with Engine(
        tiny_model, num_threads=1, max_num_batched_tokens=budget, max_model_len=1024
    ) as engine:
        stream = SamplingParams(
            temperature=0, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        short = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        engine.add_request("stream", [5, 6, 7], stream)
        engine.step()
        for step in range(num_steps):
            engine.add_request(str(step), random_prompt(source, length), short)
            outputs = {output.request_id: output for output in engine.step()}
            assert len(outputs.pop("stream").outputs[0].token_ids) == 1, step
            for name in outputs:
                first_token.setdefault(name, step)
    # In the order of their arrival, each as soon as the budget, less a token for each that
    # decodes meanwhile, has computed the prompts up to its own.
    assert list(first_token) == [str(i) for i in range(len(first_token))]
    for i, step in enumerate(first_token.values()):
        assert step <= (i + 1) * length / (budget - 1 - answer) + 1, i
    assert len(first_token) >= num_steps * (budget - 1 - answer) // length - 1
