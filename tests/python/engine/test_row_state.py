"""What the sampler keeps of a row: nothing of it reaches another row, or the row's next owner."""

from vllm_lite import LLM, SamplingParams

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
