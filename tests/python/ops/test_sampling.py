"""The sampler against ``sampling_reference``, by hand, and by statistics. Every seed is fixed."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from ops.back_ends import PARAMS, use
from ops.sampling_reference import (
    Outcome,
    Row,
    gumbel_noise,
    philox4x32,
    processed_logits,
    reference_token,
    sample,
    survivors,
)
from vllm_lite import ops

INF = float("inf")
NAN = float("nan")


def random_logits(seed: int, rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def log_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


def sampled_set(logits: torch.Tensor, row: Row, draws: int = 80) -> set[int]:
    """Every id that `draws` positions give."""
    rows = [row.at(position) for position in range(draws)]
    return set(sample(logits.expand(draws, -1), rows).tokens())


# ---- the reference itself


def test_philox_gives_the_published_answers() -> None:
    # kat_vectors of Random123, philox4x32 10.
    zero = philox4x32(np.zeros((1, 4), dtype=np.uint64), (0, 0))[0]
    assert [f"{word:08x}" for word in zero] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    ones = philox4x32(np.full((1, 4), 0xFFFFFFFF, dtype=np.uint64), (0xFFFFFFFF, 0xFFFFFFFF))[0]
    assert [f"{word:08x}" for word in ones] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


# ---- greedy and rows that fail


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 63, 64, 65, 1000, 49152])
def test_greedy_is_the_argmax(vocab_size: int, back_end: str) -> None:
    logits = random_logits(1, 8, vocab_size)
    assert sample(logits, [Row()] * 8).tokens() == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_id_among_equals(back_end: str) -> None:
    logits = torch.zeros(4, 200)
    logits[0, [150, 37, 199]] = 5.0
    logits[1, [18, 2]] = 1.0
    logits[2] = -0.0  # equal to 0.0
    logits[2, 90] = 0.0
    logits[3] = -INF
    logits[3, 77] = -1e30
    assert sample(logits, [Row()] * 4).tokens() == [37, 2, 0, 77]


@pytest.mark.case("KVA-03")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [0, 5, 63, 64, 99])
def test_a_row_with_nan_or_without_a_candidate_fails_alone(
    bad: int, temperature: float, back_end: str
) -> None:
    logits = random_logits(2, 6, 100)
    logits[1, bad] = NAN
    logits[2] = -INF
    logits[3, bad] = INF
    logits[4, bad] = NAN
    rows = [Row(temperature, seed=i, num_logprobs=2, output=[1]) for i in range(6)]
    rows[4] = Row(temperature, allowed=[bad - 1 if bad else 1])  # the NaN is masked, and still one
    outcome = sample(logits, rows)
    tokens = outcome.tokens()
    assert tokens[1:5] == [-1, -1, -1, -1]
    assert tokens[0] == reference_token(logits[0].numpy(), rows[0])
    assert tokens[5] == reference_token(logits[5].numpy(), rows[5])
    assert outcome.ranks[1] == 0 and (outcome.top_ids[1] == -1).all()
    assert outcome.output_counts is not None
    assert outcome.output_counts.sum(-1).tolist() == [2, 1, 1, 1, 0, 2]


def test_masks_that_leave_no_candidate_fail_the_row(back_end: str) -> None:
    logits = random_logits(3, 3, 50)
    logits[1, 7] = -INF
    rows = [
        Row(1.0, allowed=[3], stop=[3], min_total_tokens=9, position=8),
        Row(1.0, allowed=[7]),
        Row(1.0, allowed=[50, -1, 2**31 - 1]),
    ]
    assert sample(logits, rows).tokens() == [-2, -2, -2]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000, 8192, 8193, 20_000])
def test_a_token_mask_leaves_what_it_allows(vocab_size: int, back_end: str) -> None:
    random = np.random.default_rng(vocab_size)
    logits = random_logits(4, 8, vocab_size)
    logits[6] = -INF

    def some(share: float) -> list[int]:
        return np.flatnonzero(random.random(vocab_size) < share).tolist()

    rows = [
        Row(unmasked=some(0.5)),
        Row(),
        Row(0.9, top_k=5, seed=1, unmasked=[*some(0.1), vocab_size - 1], num_logprobs=3),
        Row(0.9, top_p=0.8, seed=2, unmasked=some(0.9), allowed=some(0.5), bias={0: 5.0}),
        Row(1.0, seed=3, unmasked=range(vocab_size), output=[0], frequency=0.5),
        Row(1.0, seed=4, unmasked=[]),
        Row(1.0, seed=5, unmasked=[0]),
        Row(0.0, unmasked=some(0.5), stop=some(0.5), min_total_tokens=9, position=8),
    ]
    outcome = sample(logits, rows)
    expected = [reference_token(logits[i].numpy(), row) for i, row in enumerate(rows)]
    assert outcome.tokens() == expected
    assert outcome.tokens()[5:7] == [-2, -1]
    # Logprobs are of the model's own logits, masked or not.
    logprobs = logits[2].double().log_softmax(-1)
    token, count = outcome.tokens()[2], min(3, vocab_size)
    torch.testing.assert_close(outcome.logprobs[2].double(), logprobs[token], atol=1e-5, rtol=0)
    assert outcome.top_ids[2, :count].tolist() == logprobs.topk(count).indices.tolist()


def test_wrong_token_masks_are_refused() -> None:
    ids = torch.zeros(2, dtype=torch.int32)
    for masks, index, message in (
        (torch.zeros(1, 2, dtype=torch.int32), ids, r"token_masks must be \[num_masks"),
        (torch.zeros(1, 1, dtype=torch.int32), ids[:1], r"mask_index \[num_rows\]"),
        (torch.zeros(1, 1, dtype=torch.int32), None, "token_masks and mask_index come together"),
        (torch.zeros(1, 1), ids, "token_masks has the wrong dtype"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.sample(
                torch.zeros(2, 8), ids, ids, STATE, *(None,) * 3, ids, *(None,) * 6, masks, index
            )


@pytest.mark.parametrize("nowhere", [-(2**31), -1, 2, 2**31 - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_state_fails_alone(temperature: float, nowhere: int, back_end: str) -> None:
    logits = random_logits(13, 3, 300)
    rows = [Row(temperature, seed=i, num_logprobs=2, bias={7: 1.0}, output=[5]) for i in range(3)]
    outcome = sample(logits, rows, state_rows=[1, nowhere, 0], max_rows=2)
    expected = [reference_token(logits[i].numpy(), rows[i]) for i in range(3)]
    assert outcome.tokens() == [expected[0], -1, expected[2]]
    assert outcome.ranks[1] == 0 and outcome.logprobs[1] == -INF
    assert (outcome.top_ids[1] == -1).all() and (outcome.top_logprobs[1] == -INF).all()
    assert outcome.output_counts is not None
    assert outcome.output_counts.sum(-1).tolist() == [2, 2]


# ---- sampling equals the reference


CUTS = {
    "all": Row(1.0),
    "cold": Row(0.3),
    "hot": Row(2.5),
    "top_k": Row(1.0, top_k=20),
    "top_k_one": Row(1.0, top_k=1),
    "top_k_most": Row(1.0, top_k=900),
    "top_p": Row(1.0, top_p=0.9),
    "top_p_low": Row(0.7, top_p=0.1),
    "top_p_high": Row(1.5, top_p=0.9999),
    "min_p": Row(1.3, min_p=0.05),
    "top_k_top_p": Row(0.8, top_k=50, top_p=0.95),
    "everything": Row(
        0.9,
        top_k=400,
        top_p=0.97,
        min_p=0.01,
        repetition=1.3,
        presence=0.4,
        frequency=0.2,
        bias={3: 4.0, 900: -5.0},
        stop=[1, 2],
        min_total_tokens=20,
        prompt=[1, 5, 9],
        output=[7, 7, 30, 100],
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_the_choice_equals_the_reference(name: str, back_end: str) -> None:
    num_rows, vocab_size = 40, 1003
    logits = random_logits(4, num_rows, vocab_size)
    logits[::2] = logits[::2].bfloat16().float()  # many ties
    logits[3, ::3] = -INF
    rows = [replace(CUTS[name], seed=2**40 * i - 3, position=i) for i in range(num_rows)]
    expected = [reference_token(logits[i].numpy(), rows[i]) for i in range(num_rows)]
    assert sample(logits, rows).tokens() == expected


@pytest.mark.parametrize("name", ["all", "top_k", "top_p", "top_p_high", "top_k_top_p"])
def test_a_large_vocabulary(name: str, back_end: str) -> None:
    logits = random_logits(5, 3, 151936)
    rows = [replace(CUTS[name], seed=i, position=4095) for i in range(3)]
    expected = [reference_token(logits[i].numpy(), rows[i]) for i in range(3)]
    assert sample(logits, rows).tokens() == expected


def test_every_noise_is_the_reference_noise(back_end: str) -> None:
    # With equal logits the choice is the id of the largest noise.
    rows = [Row(1.0, seed=-1 - i, position=2**31 - 1 - i) for i in range(200)]
    expected = [int(gumbel_noise(row.seed, row.position, 259).argmax()) for row in rows]
    assert sample(torch.zeros(200, 259), rows).tokens() == expected


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38])
def test_a_tiny_temperature_is_greedy(temperature: float, back_end: str) -> None:
    logits = random_logits(6, 30, 500)
    rows = [Row(temperature, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(30)]
    assert sample(logits, rows).tokens() == logits.argmax(-1).tolist()


def test_extreme_logits_and_a_huge_temperature(back_end: str) -> None:
    logits = torch.full((4, 100), -3e38)
    logits[:, 40] = 3e38
    logits[2:, 50:] = -INF
    rows = [
        Row(0.5),
        Row(0.5, top_p=0.5),
        Row(1e30, top_p=0.9, seed=1),
        Row(1e38, top_k=60, top_p=0.5, seed=2),
    ]
    tokens = sample(logits, rows).tokens()
    assert tokens[:2] == [40, 40]
    assert 0 <= tokens[2] < 50 and 0 <= tokens[3] < 50


# ---- cuts by hand


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (Row(1.0, top_k=3), {0, 1, 2}),
        (Row(1.0, top_p=0.45), {0, 1, 2, 3, 4}),
        (Row(1.0, top_p=0.5), {0, 1, 2, 3, 4}),  # exactly
        (Row(1.0, top_p=0.0), {0}),
        (Row(1.0, min_p=1.0), set(range(10))),
        (Row(1.0, top_k=10), set(range(10))),
        (Row(1.0, top_k=4, top_p=0.6), {0, 1, 2}),
    ],
    ids=str,
)
def test_ties_at_a_boundary_go_to_the_lowest_ids(row: Row, kept: set[int], back_end: str) -> None:
    assert sampled_set(torch.zeros(1, 10), row) == kept


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (Row(1.0, top_k=2), {1, 2}),
        (Row(1.0, top_p=0.39), {1}),
        (Row(1.0, top_p=0.41), {1, 2}),  # the token that crosses stays
        (Row(1.0, top_p=0.71), {0, 1, 2}),
        (Row(1.0, top_k=2, top_p=0.5), {1}),  # of the rest: 0.4 / 0.7 = 0.57
        (Row(1.0, min_p=0.74), {1, 2}),  # 0.3 / 0.4 = 0.75
        (Row(1.0, min_p=0.76), {1}),
        (Row(1.0, min_p=1.0), {1}),
        (Row(1.0, top_p=0.9, min_p=0.6), {1, 2}),
        (Row(0.5, top_p=0.55), {1, 2}),  # squares: 0.16, 0.09, 0.04, 0.01 of 0.3
        (Row(0.5, top_p=0.53), {1}),
    ],
    ids=str,
)
def test_cuts_by_hand(row: Row, kept: set[int], back_end: str) -> None:
    assert sampled_set(log_of(0.2, 0.4, 0.3, 0.1), row) == kept


def test_equal_weights_of_unequal_logits_are_cut_by_logit(back_end: str) -> None:
    # At this temperature every weight is exactly 1.
    logits = torch.tensor([[-3.0, -1.0, 0.0, -2.0]])
    assert sampled_set(logits, Row(1e30, top_p=0.5)) == {2, 1}
    assert sampled_set(logits, Row(1e30, top_p=0.51)) == {2, 1, 3}


def test_a_long_tail_just_inside_top_p(back_end: str) -> None:
    # Each of the tail is small against what top_p leaves out; four fifths of it stay all the same.
    logits = torch.full((1, 1001), -3.0)
    logits[0, 0] = 0.0
    tail = float(1000 * np.exp(-3.0))
    row = Row(1.0, top_p=1.0 - tail / 5 / (1.0 + tail))
    drawn = sampled_set(logits, row, 600)
    assert 380 < len(drawn) <= 802 and max(drawn) in (799, 800, 801)


def test_two_of_three_equal_second_places(back_end: str) -> None:
    assert sampled_set(log_of(0.4, 0.3, 0.3), Row(1.0, top_k=2)) == {0, 1}


def test_settings_that_cut_nothing_change_nothing(back_end: str) -> None:
    logits = random_logits(7, 50, 300)
    plain = sample(logits, [Row(1.0, seed=i) for i in range(50)]).tokens()
    idle = [
        Row(1.0, top_k=k, top_p=p, seed=i)
        for i, (k, p) in enumerate([(300, 1.0), (10**6, 1.0), (0, 1.0), (300, 1.5), (-1, 1.0)] * 10)
    ]
    assert sample(logits, idle).tokens() == plain


def test_the_tightest_cuts_are_greedy(back_end: str) -> None:
    logits = random_logits(8, 4, 300)
    rows = [
        Row(5.0, top_k=1),
        Row(5.0, top_p=0.0),
        Row(5.0, min_p=1.0),
        Row(5.0, min_p=3.0),
    ]
    assert sample(logits, rows).tokens() == logits.argmax(-1).tolist()


# ---- bias, masks, penalties


def assert_effective_logit(logits: torch.Tensor, row: Row, token: int, value: float) -> None:
    """`token`, whose processed logit should be `value`, just beats and just loses to another."""
    rival = logits.shape[1] - 1
    for offset, winner in ((-1e-4, token), (1e-4, rival)):
        contest = logits.clone()
        contest[0, rival] = value + offset
        one = replace(row, allowed=[token, rival])
        assert sample(contest, [one]).tokens() == [winner]


@pytest.mark.case("PEN-03")
def test_penalties_by_hand_at_the_first_and_second_step(back_end: str) -> None:
    # Prompt [3, 3, 4]: repetition counts it from the first step, the other two never do.
    logits = torch.tensor([[1.0, -1.0, 0.5, 2.0, -2.0, 0.25, 0.0]])
    first = Row(repetition=2.0, presence=0.5, frequency=0.25, prompt=[3, 3, 4], position=3)
    assert_effective_logit(logits, first, 3, 2.0 / 2)
    assert_effective_logit(logits, first, 4, -2.0 * 2)
    assert_effective_logit(logits, first, 0, 1.0)
    second = replace(first, output=[0, 3, 3, 1], position=7)
    assert_effective_logit(logits, second, 0, 1.0 / 2 - 0.25 - 0.5)
    assert_effective_logit(logits, second, 1, -1.0 * 2 - 0.25 - 0.5)
    assert_effective_logit(logits, second, 3, 2.0 / 2 - 2 * 0.25 - 0.5)
    assert_effective_logit(logits, second, 4, -2.0 * 2)
    assert_effective_logit(logits, second, 5, 0.25)
    negative = Row(repetition=0.5, presence=-1.0, frequency=-0.5, output=[1])
    assert_effective_logit(logits, negative, 1, -0.5 + 0.5 + 1.0)


def test_the_sampled_token_is_counted(back_end: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).expand(2, -1)
    # Rows 5 and 2 of the state; presence 1.5 makes the second token the best once the first is out.
    row = Row(presence=1.5, output=[1])
    outcome = sample(logits, [row, Row(output=[1])], state_rows=[5, 2])
    assert outcome.tokens() == [2, 1]
    assert outcome.output_counts is not None
    assert outcome.output_counts[5].tolist() == [0, 1, 1, 0]
    assert outcome.output_counts[2].tolist() == [0, 2, 0, 0]
    assert outcome.output_counts.sum() == 4


def test_bias_moves_a_logit_and_comes_before_the_repetition_penalty(back_end: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    assert_effective_logit(logits, Row(bias={0: 2.5}), 0, 3.5)
    assert_effective_logit(logits, Row(bias={0: -3.0}, repetition=2.0, prompt=[0]), 0, -4.0)
    assert sample(logits, [Row(bias={0: 100.0})]).tokens() == [0]


def test_ids_outside_the_vocabulary_are_ignored(back_end: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    wild = [-1, 3, 2**31 - 1, -(2**31)]
    row = Row(
        bias=dict.fromkeys(wild, 50.0) | {0: 3.0},
        allowed=[*wild, 0, 2],
        stop=[*wild, 0],
        min_total_tokens=5,
        position=4,
    )
    assert sample(logits, [row]).tokens() == [2]


@pytest.mark.case("STP-06")
def test_stop_ids_are_masked_until_the_minimum_length(back_end: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(3, -1)
    rows = [Row(stop=[1, 2], min_total_tokens=10, position=p) for p in (8, 9, 10)]
    assert sample(logits, rows).tokens() == [0, 0, 1]


def test_lists_belong_to_their_row(back_end: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).expand(4, -1)
    rows = [Row(), Row(allowed=[3, 0, 3]), Row(bias={2: 5.0}), Row(stop=[1], min_total_tokens=1)]
    assert sample(logits, rows).tokens() == [1, 0, 2, 2]


# ---- logprobs


@pytest.mark.parametrize("vocab_size", [5, 100, 151936])
def test_logprobs_are_of_the_raw_logits(vocab_size: int, back_end: str) -> None:
    logits = random_logits(9, 6, vocab_size, 5.0)
    expected = logits.double().log_softmax(-1)
    rows = [
        Row(0.7 * (i % 2), top_k=3, bias={i % 5: 6.0}, seed=i, num_logprobs=i % 4) for i in range(6)
    ]
    outcome = sample(logits, rows)
    for i, token in enumerate(outcome.tokens()):
        assert outcome.logprobs[i].item() == pytest.approx(expected[i, token].item(), abs=1e-5)
        assert outcome.ranks[i] == 1 + (logits[i] > logits[i, token]).sum()
        count = rows[i].num_logprobs
        best = logits[i].double().topk(count)
        assert outcome.top_ids[i, :count].tolist() == best.indices.tolist()
        found = outcome.top_logprobs[i, :count].double()
        torch.testing.assert_close(found, expected[i][best.indices], atol=1e-5, rtol=0)
        assert (outcome.top_ids[i, count:] == -1).all()


def test_top_ids_are_distinct_and_ordered_also_among_ties(back_end: str) -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [2999, 5, 700]] = 1.0
    outcome = sample(logits, [Row(num_logprobs=8)])
    assert outcome.top_ids[0, :8].tolist() == [5, 700, 2999, 0, 1, 2, 3, 4]
    assert outcome.tokens() == [5] and outcome.ranks.tolist() == [1]


def test_more_logprobs_than_finite_logits_or_vocabulary(back_end: str) -> None:
    logits = torch.tensor([[-INF, 1.0, -INF, 2.0]])
    outcome = sample(logits, [Row(num_logprobs=6)])
    assert outcome.top_ids[0].tolist() == [3, 1, 0, 2, -1, -1, -1]
    assert outcome.top_logprobs[0, 2:].tolist() == [-INF] * 5


def test_rows_that_ask_for_no_logprobs_get_none(back_end: str) -> None:
    outcome = sample(torch.zeros(2, 9), [Row(num_logprobs=2), Row()])
    assert (outcome.top_ids[1] == -1).all() and outcome.ranks.tolist() == [1, 0]


# ---- statistics

NUM_DRAWS = 12000  # enough to tell a temperature of 1.05 from 1


def chi_square(tokens: list[int], probabilities: np.ndarray) -> float:
    expected = probabilities * len(tokens)
    observed = np.bincount(tokens, minlength=len(probabilities))
    assert (observed[probabilities == 0] == 0).all()
    inside = expected > 0
    return float((np.square(observed - expected)[inside] / expected[inside]).sum())


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("name", ["all", "hot", "top_p", "top_k_top_p"])
def test_frequencies_follow_the_distribution(name: str, vary: str) -> None:
    vocab_size = 60
    row = CUTS[name]
    logits = random_logits(10, 1, vocab_size, 1.5)
    kept = survivors(processed_logits(logits[0].numpy(), row), row)
    probabilities = np.zeros(vocab_size)
    x = logits[0].double().numpy()[kept] / row.temperature
    probabilities[kept] = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    rows = [
        replace(row, seed=77, position=i)
        if vary == "position"
        else replace(row, seed=i, position=5)
        for i in range(NUM_DRAWS)
    ]
    tokens = sample(logits.expand(NUM_DRAWS, -1), rows).tokens()
    freedom = len(kept) - 1
    # Mean + 4.5 standard deviations of chi-square; the seeds are fixed, so this is one number.
    assert chi_square(tokens, probabilities) < freedom + 4.5 * np.sqrt(2 * freedom)


def test_the_frequency_test_notices_a_wrong_temperature() -> None:
    rows = [Row(1.05, seed=i) for i in range(NUM_DRAWS)]
    tokens = sample(random_logits(10, 1, 60, 1.5).expand(NUM_DRAWS, -1), rows).tokens()
    probabilities = random_logits(10, 1, 60, 1.5)[0].double().softmax(-1).numpy()
    assert chi_square(tokens, probabilities) > 59 + 4.5 * np.sqrt(2 * 59)


# ---- what a row may not depend on


def mixed_rows(count: int) -> list[Row]:
    cuts = list(CUTS.values())
    return [
        Row(
            **{**cuts[i % len(cuts)].__dict__, "seed": 31 * i, "position": i, "num_logprobs": i % 5}
        )
        for i in range(count)
    ]


def outcome_of(outcome: Outcome, row: int, count: int) -> tuple[object, ...]:
    return (
        int(outcome.token_ids[row]),
        float(outcome.logprobs[row]),
        int(outcome.ranks[row]),
        outcome.top_ids[row, :count].tolist(),
        outcome.top_logprobs[row, :count].tolist(),
    )


def test_a_row_does_not_depend_on_its_neighbours_or_place(back_end: str) -> None:
    logits = random_logits(11, 64, 2050)
    rows = mixed_rows(64)
    order = np.random.default_rng(3).permutation(64).tolist()
    together = sample(logits, rows)
    shuffled = sample(logits[order], [rows[i] for i in order], state_rows=order)
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], [rows[i]], state_rows=[3])
        count = max(rows[i].num_logprobs, 0)
        assert outcome_of(alone, 0, count) == outcome_of(together, i, count)
        assert outcome_of(alone, 0, count) == outcome_of(shuffled, place, count)


def test_a_strided_view_of_logits(back_end: str) -> None:
    wide = random_logits(12, 8, 700)
    rows = mixed_rows(8)
    view = wide[:, 100:601]
    assert (
        sample(view, rows[:3] + rows[:3] + rows[:2]).tokens()
        == sample(view.contiguous(), rows[:3] + rows[:3] + rows[:2]).tokens()
    )


def random_row(random: np.random.Generator, vocab_size: int, position: int) -> Row:
    """Any mixture of options, the usual values and the odd ones."""

    def one_of(*values: float) -> float:
        return values[random.integers(len(values))]

    def ids(most: int) -> list[int]:
        return random.integers(-2, vocab_size + 2, random.integers(most)).tolist()

    def history(most: int) -> list[int]:
        return random.integers(0, vocab_size, random.integers(most)).tolist()

    return Row(
        temperature=one_of(0.0, 0.2, 0.7, 1.0, 1.0, 1.6, 1e-30, 1e30),
        top_k=int(one_of(0, 0, 1, 2, 40, vocab_size // 2, vocab_size, 2**31 - 1)),
        top_p=one_of(1.0, 1.0, 0.0, 0.3, 0.9, 0.95, 0.9999, 0.9999999),
        min_p=one_of(0.0, 0.0, 0.0, 0.02, 0.5, 1.0),
        repetition=one_of(1.0, 1.0, 1.2, 0.7),
        presence=one_of(0.0, 0.0, 0.6, -0.4),
        frequency=one_of(0.0, 0.0, 0.3, -0.2),
        num_logprobs=int(one_of(-1, -1, 0, 1, 5, 20)),
        min_total_tokens=int(one_of(0, 0, position, position + 1)),
        seed=int(random.integers(-(2**63), 2**63)),
        position=position,
        bias=dict.fromkeys(ids(20), one_of(-4.0, 2.5, 7.0)) if random.random() < 0.3 else {},
        allowed=ids(400) if random.random() < 0.2 else [],
        stop=ids(10),
        prompt=history(50),
        output=history(50),
    )


def random_case(seed: int, num_rows: int, vocab_size: int) -> tuple[torch.Tensor, list[Row]]:
    random = np.random.default_rng(seed)
    scale = torch.tensor(random.choice([0.0, 0.5, 3.0, 8.0], (num_rows, 1)), dtype=torch.float32)
    logits = random_logits(seed, num_rows, vocab_size, 1.0) * scale
    rounded = torch.from_numpy(random.random(num_rows) < 0.5)
    logits[rounded] = logits[rounded].bfloat16().float()  # many ties
    logits[::7, ::3] = -INF
    logits[5::31, vocab_size // 2] = NAN
    logits[6::37] = -INF
    return logits, [random_row(random, vocab_size, int(random.integers(5000))) for _ in logits]


@pytest.mark.parametrize("back_end", PARAMS)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [(200, 7), (200, 1003), (60, 4099), (40, 8192), (40, 20_011), (8, 49_152), (6, 151_936)],
)
def test_every_back_end_gives_the_same_bits(num_rows: int, vocab_size: int, back_end: str) -> None:
    logits, rows = random_case(vocab_size, num_rows, vocab_size)

    def run(name: str) -> Outcome:
        with use(name):
            return sample(logits, rows)

    expected, actual = run("portable"), run(back_end)
    for field in fields(Outcome):
        a, b = getattr(actual, field.name), getattr(expected, field.name)
        assert torch.equal(a, b), (field.name, [rows[i] for i in (a != b).nonzero()[:1, 0]])


# ---- arguments

STATE = torch.zeros(2, 16, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits: logits.double(), "logits must be float32"),
        (lambda logits: logits[0], "logits must be float32"),
    ],
)
def test_wrong_logits_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    logits = change(torch.zeros(2, 8))
    ids = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        ops.sample(logits, ids, ids, STATE, *(None,) * 3, ids, *(None,) * 4)


@pytest.mark.parametrize(
    ("state", "lists", "message"),
    [
        (STATE[:, :15], None, r"row_state must be \[max_rows, 16\]"),
        (STATE.float(), None, "row_state has the wrong dtype"),
        (STATE, torch.zeros(3, 4, dtype=torch.int32), r"id_lists must be \[max_rows, words\]"),
        (STATE, torch.zeros(2, 4), "id_lists has the wrong dtype"),
    ],
)
def test_wrong_row_state_is_refused(
    state: torch.Tensor, lists: torch.Tensor | None, message: str
) -> None:
    ids = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        ops.sample(torch.zeros(2, 8), ids, ids, state, lists, None, None, ids, *(None,) * 4)


@pytest.mark.parametrize("given", [None, 4096])
def test_cuda_refuses_a_workspace_that_is_too_small(given: int | None) -> None:
    ids = torch.zeros(2, dtype=torch.int32)
    with use("cuda_on_host"), pytest.raises(RuntimeError, match="needs a workspace"):
        ops.sample(
            torch.zeros(2, 8), ids, ids, STATE, *(None,) * 3, ids, *(None,) * 4,
            None if given is None else torch.empty(given, dtype=torch.uint8),
        )  # fmt: skip
