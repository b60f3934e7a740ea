"""What the sampler keeps of a row: nothing of it reaches another row, or the row's next owner."""

import numpy as np
import pytest
import torch

from vllm_lite import LLM, SamplingParams
from vllm_lite.worker.largest_step import largest_plan
from vllm_lite.worker.step_plan import NEW_ROW, StepPlan

PROMPT = "The quick"
PLAIN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=6, logit_bias={7: 100.0}, ignore_eos=True)
MANY = SamplingParams(
    temperature=0, max_tokens=6, allowed_token_ids=list(range(30, 150)), ignore_eos=True
)
REPEATED = SamplingParams(temperature=0, max_tokens=6, repetition_penalty=50.0, ignore_eos=True)
ALL = [PLAIN, FEW, MANY, REPEATED]


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.case("SMP-06")
def test_the_next_owner_of_a_row_inherits_nothing(tiny_model: str) -> None:
    with LLM(tiny_model, num_threads=1, max_model_len=256, max_num_seqs=1) as llm:
        (first,) = tokens(llm, [PLAIN])
        assert tokens(llm, [FEW]) == [[7] * 6]
        assert tokens(llm, [PLAIN]) == [first]
        (allowed,) = tokens(llm, [MANY])
        assert all(30 <= token < 150 for token in allowed)
        assert tokens(llm, [FEW]) == [[7] * 6]
        (repeated,) = tokens(llm, [REPEATED])
        assert repeated != first and tokens(llm, [PLAIN, REPEATED]) == [first, repeated]


def test_longer_lists_of_another_row_leave_a_rows_own_in_place(tiny_model: str) -> None:
    with LLM(tiny_model, num_threads=1, max_model_len=256, max_num_seqs=4) as llm:
        alone = [tokens(llm, [one])[0] for one in ALL]
    # Again from a start without any lists, which then become longer twice.
    with LLM(tiny_model, num_threads=1, max_model_len=256, max_num_seqs=4) as llm:
        assert tokens(llm, ALL) == alone
        assert tokens(llm, ALL[::-1]) == alone[::-1]


def test_row_lists_are_found_and_must_add_up() -> None:
    words = np.frombuffer(largest_plan(64, 3, 32, 16, 100), dtype=np.int32)
    plan = StepPlan(words.tobytes())
    first, *others = plan.row_lists()
    # Bias ids and values of 100 ids, all of them allowed, and all stop ids; 32 tokens of history.
    assert (first.ids, first.prompt, first.output) == (
        slice(0, 400), slice(400, 400), slice(400, 432),
    )  # fmt: skip
    assert [(one.row, one.output) for one in others] == [(1, slice(432, 433)), (2, slice(433, 434))]
    new_rows = plan.split_changes(plan.changes).new_rows.numpy().view(NEW_ROW)[:, 0]
    new_rows["num_prompt_tokens"] = 20
    prompts = [(one.prompt, one.output) for one in plan.row_lists()]
    assert prompts[0] == (slice(400, 420), slice(420, 432))
    new_rows["num_history"] += 1
    with pytest.raises(ValueError, match="wrong length"):
        list(plan.row_lists())
    with pytest.raises(RuntimeError):
        plan.split_changes(torch.cat([plan.changes, plan.changes[:1]]))
