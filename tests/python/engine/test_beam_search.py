"""Beam search equals transformers' on random models, and the best of all sequences at full width.

pytest -m slow tests/python/engine/test_beam_search.py     and is as fast as it has to be
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoints import make_model, prompt
from tiny_model import VOCAB_SIZE, make_tiny_model
from vllm_lite import LLM, BeamSearchParams, SamplingParams
from vllm_lite.errors import EngineError

PENALTIES = (-1.0, 0.0, 0.6, 1.0, 2.0)
MODES: tuple[bool | str, ...] = (False, True, "never")
EOS_IDS = [1, 40, 41]  # 1 is the tokenizer's
MAX_TOKENS = 10
# Of one length, so that transformers takes them as one batch without padding.
PROMPTS = [prompt(19, seed=seed, vocab_size=VOCAB_SIZE) for seed in range(3)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory": 8 << 20}


def model_with_frequent_eos(**config: Any) -> Any:
    """Its distributions are peaked enough for beams to differ, and EOS ends some of them early."""
    model = make_model(
        "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=2, eos_token_id=EOS_IDS, bos_token_id=0,
        **config,
    )  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
        # Rows in the direction of many hidden states make their tokens likely in many places.
        states = model.model(torch.tensor([PROMPTS[2]])).last_hidden_state[0]
        for eos, state in zip(EOS_IDS, states[::12], strict=False):
            model.lm_head.weight[eos] = 6.0 * state / state.norm() * state.norm() ** -0.5
    return model


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    directory = make_tiny_model(tmp_path_factory.mktemp("beams"))
    model = model_with_frequent_eos()
    model.save_pretrained(directory)
    return model, str(directory)


@pytest.fixture(scope="module")
def llm(fixture: tuple[Any, str]) -> Iterator[LLM]:
    with LLM(fixture[1], max_num_seqs=24, **OPTIONS) as llm:
        yield llm


@torch.inference_mode()
def reference(
    model: Any,
    prompts: list[list[int]],
    width: int,
    penalty: float,
    mode: bool | str,
    *,
    max_tokens: int = MAX_TOKENS,
    eos: list[int] | None = None,
) -> list[list[tuple[list[int], float]]]:
    """For each prompt (output tokens up to their end, score), best first, as transformers' generate
    finds them.
    """
    eos = EOS_IDS if eos is None else eos
    out = model.generate(
        torch.tensor(prompts), num_beams=width, num_return_sequences=width, do_sample=False,
        max_new_tokens=max_tokens, length_penalty=penalty, early_stopping=mode, eos_token_id=eos,
        pad_token_id=0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    results = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompts[0]) :]
        ends = [i for i, token in enumerate(tokens) if token in eos]
        results.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return [results[i : i + width] for i in range(0, len(results), width)]


@pytest.mark.case("BEM-03")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", range(2, 9))  # transformers does not search with one beam
def test_every_width_and_mode_gives_what_transformers_gives(
    fixture: tuple[Any, str], llm: LLM, width: int, mode: bool | str
) -> None:
    """With two of the penalties each; with all of them in the slow test."""
    first = 2 * width + MODES.index(mode)
    for penalty in (PENALTIES[first % 5], PENALTIES[(first + 2) % 5]):
        check_against_transformers(fixture[0], llm, width, penalty, mode)


@pytest.mark.slow
@pytest.mark.case("BEM-03")
def test_every_width_penalty_and_mode_gives_what_transformers_gives(
    fixture: tuple[Any, str], llm: LLM
) -> None:
    for width, penalty, mode in itertools.product(range(2, 9), PENALTIES, MODES):
        check_against_transformers(fixture[0], llm, width, penalty, mode)


def check_against_transformers(
    model: Any, llm: LLM, width: int, penalty: float, mode: bool | str
) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=MAX_TOKENS, length_penalty=penalty, early_stopping=mode
    )
    outputs = llm.beam_search(PROMPTS, params)
    expected = reference(model, PROMPTS, width, penalty, mode)
    for ids, got, want in zip(PROMPTS, outputs, expected, strict=True):
        assert [sequence.tokens for sequence in got.sequences] == [ids + t for t, _ in want]
        for sequence, (tokens, score) in zip(got.sequences, want, strict=True):
            assert sequence.cum_logprob / len(tokens) ** penalty == pytest.approx(score, abs=1e-3)
            assert len(sequence.logprobs) == len(tokens)
            chosen = [entry[token].logprob
                      for token, entry in zip(tokens, sequence.logprobs, strict=True)]  # fmt: skip
            assert sum(chosen) == pytest.approx(sequence.cum_logprob)
            assert sequence.finish_reason == ("stop" if tokens[-1] in EOS_IDS else "length")


def test_sequences_end_early_and_late_in_these_models(llm: LLM) -> None:
    """What the tests above rest on."""
    params = BeamSearchParams(beam_width=8, max_tokens=MAX_TOKENS)
    sequences = [s for out in llm.beam_search(PROMPTS, params) for s in out.sequences]
    assert {s.finish_reason for s in sequences} == {"stop", "length"}
    assert len({len(s.logprobs) for s in sequences}) > 3


def test_one_beam_is_greedy_search(llm: LLM) -> None:
    greedy = llm.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0), use_tqdm=False
    )
    beams = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=MAX_TOKENS))
    for ids, one, other in zip(PROMPTS, beams, greedy, strict=True):
        assert one.sequences[0].tokens == ids + other.outputs[0].token_ids
        assert one.sequences[0].cum_logprob == other.outputs[0].cumulative_logprob


@pytest.mark.case("BEM-03")
def test_a_larger_length_penalty_prefers_longer_sequences(llm: LLM) -> None:
    def mean_length(penalty: float) -> float:
        params = BeamSearchParams(
            beam_width=6, max_tokens=30, length_penalty=penalty, early_stopping="never"
        )
        best = [output.sequences[0] for output in llm.beam_search(PROMPTS, params)]
        return sum(len(sequence.logprobs) for sequence in best) / len(best)

    short, middle, long = map(mean_length, (0.1, 1.0, 3.0))
    assert short <= middle <= long
    assert short < long


@pytest.mark.case("BEM-05")
def test_stop_ids_that_are_not_eos_end_sequences(fixture: tuple[Any, str], llm: LLM) -> None:
    ids = PROMPTS[1]
    first = SamplingParams(temperature=0, max_tokens=1)
    frequent = llm.generate([ids], first, use_tqdm=False)[0].outputs[0].token_ids[0]
    params = BeamSearchParams(
        beam_width=3, max_tokens=MAX_TOKENS, length_penalty=0, ignore_eos=True,
        stop_token_ids=[frequent],
    )  # fmt: skip
    expected = reference(fixture[0], [ids], 3, 0.0, False, eos=[frequent])[0]
    sequences = llm.beam_search([ids], params)[0].sequences
    assert [s.tokens for s in sequences] == [ids + tokens for tokens, _ in expected]
    stopped = [s for s in sequences if s.tokens[-1] == frequent]
    assert stopped
    for sequence in stopped:
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", frequent)
        shown = llm.get_tokenizer().decode(sequence.tokens[:-1], skip_special_tokens=False)
        assert sequence.text == shown


def test_ignore_eos_goes_on_to_the_length(fixture: tuple[Any, str], llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True)
    model = fixture[0]
    saved, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        with torch.inference_mode():
            rows = model.generate(
                torch.tensor([PROMPTS[0]]), num_beams=4, num_return_sequences=4, do_sample=False,
                max_new_tokens=9, pad_token_id=0,
            ).tolist()  # fmt: skip
    finally:
        model.generation_config.eos_token_id = saved
    assert [s.tokens for s in llm.beam_search([PROMPTS[0]], params)[0].sequences] == rows


@pytest.mark.case("BEM-01")
def test_a_beam_search_wider_than_may_run_is_refused_and_others_end(
    fixture: tuple[Any, str],
) -> None:
    with LLM(fixture[1], max_num_seqs=1, **OPTIONS) as narrow:
        with pytest.raises(ValueError, match=r"beam_width.*max_num_seqs is 1"):
            narrow.beam_search(["Hi"], BeamSearchParams(beam_width=2, max_tokens=10))
        one = narrow.beam_search(["Hi"], BeamSearchParams(beam_width=1, max_tokens=10))
        assert len(one[0].sequences) == 1
    with LLM(fixture[1], max_num_seqs=2, **OPTIONS) as wide:
        two = wide.beam_search(["Hi"], BeamSearchParams(beam_width=2, max_tokens=10))
        assert len(two[0].sequences) == 2


@pytest.mark.parametrize("chunk", [0, 5])
def test_tiny_pools_preempt_searches_and_give_the_same(
    fixture: tuple[Any, str], llm: LLM, chunk: int
) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True)
    expected = llm.beam_search(PROMPTS, params)
    options = {**OPTIONS, "kv_cache_memory": 24 * 16 * 1024, "block_size": 16}
    with LLM(fixture[1], max_num_seqs=24, max_chunk_tokens=chunk, **options) as small:
        assert small.beam_search(PROMPTS, params) == expected
        assert small.engine.stats().num_preemptions > 0
        assert small.engine.stats().kv_used_blocks == 0


def test_other_requests_run_beside_a_search_and_neither_changes(llm: LLM) -> None:
    beams = BeamSearchParams(beam_width=5, max_tokens=MAX_TOKENS).sampling_params()
    greedy = SamplingParams(temperature=0, max_tokens=20)
    alone = [llm.generate([ids], params, use_tqdm=False)[0].outputs
             for ids, params in itertools.product(PROMPTS, (beams, greedy))]  # fmt: skip
    prompts = [ids for ids in PROMPTS for _ in range(2)]
    together = llm.generate(prompts, [beams, greedy] * 3, use_tqdm=False)
    assert [output.outputs for output in together] == alone


def test_an_abort_in_the_middle_frees_everything(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=8, max_tokens=60, ignore_eos=True).sampling_params()
    engine = llm.engine
    for num_steps in (1, 2, 7):
        engine.add_request("beams", PROMPTS[2], params)
        for _ in range(num_steps):
            assert engine.step() == []
        engine.abort_request("beams")
        stats = engine.stats()
        assert (stats.kv_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


# --- all sequences of a vocabulary of 8 -----------------------------------------------------------

SMALL = 8


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    """A model of 8 token ids; five of them end a sequence, so that five tokens can begin in 81
    ways.
    """
    directory = make_tiny_model(tmp_path_factory.mktemp("eight"))
    model = make_model("llama", seed=4, vocab_size=SMALL, eos_token_id=[0, 1, 2, 3, 4])
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(directory)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                    "use_regex": True},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": True},
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate("abcdefgh")}, "merges": []},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with LLM(str(directory), max_num_seqs=96, **OPTIONS) as llm:
        yield model, llm


@torch.inference_mode()
def all_sequences(model: Any, ids: list[int], max_tokens: int) -> dict[tuple[int, ...], float]:
    """Sum of log-probabilities of every sequence that ends with EOS or has ``max_tokens``."""
    ended: dict[tuple[int, ...], float] = {}
    open_ones: dict[tuple[int, ...], float] = {(): 0.0}
    for length in range(1, max_tokens + 1):
        rows = torch.tensor([ids + list(tokens) for tokens in open_ones])
        logprobs = model(rows).logits[:, -1].double().log_softmax(-1).tolist()
        longer: dict[tuple[int, ...], float] = {}
        for (tokens, total), row in zip(open_ones.items(), logprobs, strict=True):
            for token, logprob in enumerate(row):
                ends = token < 5 or length == max_tokens
                (ended if ends else longer)[(*tokens, token)] = total + logprob
        open_ones = longer
    return ended


@pytest.mark.case("BEM-06")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 2.0])
def test_full_width_finds_the_best_of_all_sequences(
    small: tuple[Any, LLM], penalty: float, mode: bool | str
) -> None:
    model, llm = small
    for ids in ([5, 6, 7], [7, 0, 5, 5, 1]):
        scores = {tokens: total / len(tokens) ** penalty
                  for tokens, total in all_sequences(model, ids, 5).items()}  # fmt: skip
        ranked = sorted(scores, key=lambda tokens: -scores[tokens])
        params = BeamSearchParams(
            beam_width=81, max_tokens=5, length_penalty=penalty, early_stopping=mode
        )
        best = llm.beam_search([ids], params)[0].sequences[0]
        length = len(best.logprobs)
        if mode == "never":
            # early_stopping False, as transformers has it, takes no longer sequence into account
            # than the beams have tokens, and True none at all.
            assert tuple(best.tokens[len(ids) :]) == ranked[0]
        assert best.cum_logprob / length**penalty <= scores[ranked[0]] + 1e-4
        assert math.isclose(best.cum_logprob / length**penalty,
                            scores[tuple(best.tokens[len(ids) :])], abs_tol=1e-4)  # fmt: skip


def test_more_beams_than_there_are_sequences_is_an_error(small: tuple[Any, LLM]) -> None:
    with pytest.raises(EngineError, match="only 8 different sequences, but n is 9"):
        small[1].beam_search([[5, 6]], BeamSearchParams(beam_width=9, max_tokens=1))


# --- speed ----------------------------------------------------------------------------------------


def front_end_beam_search(
    llm: LLM, ids: list[int], width: int, max_tokens: int
) -> list[tuple[list[int], float]]:
    """As vLLM does it: for every token one request for every beam, with prefix caching."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True)
    beams: list[tuple[list[int], float]] = [(ids, 0.0)]
    for _ in range(max_tokens):
        outputs = llm.generate([tokens for tokens, _ in beams], params, use_tqdm=False)
        candidates = [
            ([*tokens, token], total + entry.logprob)
            for (tokens, total), output in zip(beams, outputs, strict=True)
            for token, entry in (output.outputs[0].logprobs or [{}])[0].items()
        ]
        beams = sorted(candidates, key=lambda beam: -beam[1])[:width]
    return beams


@pytest.mark.slow
def test_is_five_times_as_fast_as_requests_from_the_front_end(fixture: tuple[Any, str]) -> None:
    """In processor time, all of it this process's: other programs change that little."""
    width, max_tokens = 8, 60
    ids = prompt(300, seed=1, vocab_size=VOCAB_SIZE)
    options = {**OPTIONS, "kv_cache_memory": 64 << 20, "max_model_len": 512, "num_threads": 1}
    with LLM(fixture[1], max_num_seqs=24, enable_prefix_caching=True, **options) as llm:
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
        expected = front_end_beam_search(llm, ids, width, max_tokens)
        assert llm.beam_search([ids], params)[0].sequences[0].tokens == expected[0][0]
        engine = min(cpu_seconds(lambda: llm.beam_search([ids], params)) for _ in range(5))
        front_end = min(
            cpu_seconds(lambda: front_end_beam_search(llm, ids, width, max_tokens))
            for _ in range(3)
        )
    print(f"engine {engine * 1e3:.1f} ms, front end {front_end * 1e3:.1f} ms: "
          f"{front_end / engine:.1f} times")  # fmt: skip
    assert front_end > 5 * engine


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start
