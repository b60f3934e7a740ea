"""``LLMEngine``, step by step: output kinds, aborts, priorities."""

from itertools import pairwise

import pytest

from engine.calls import GREEDY, drain, greedy
from vllm_lite import Engine, LLMEngine, RequestOutputKind, SamplingParams


def test_output_kinds_tell_the_same(engine: LLMEngine) -> None:
    options = {"n": 2, "seed": 1, "temperature": 0.9, "logprobs": 2, "max_tokens": 10}
    for kind in RequestOutputKind:
        params = SamplingParams(**options, ignore_eos=True, output_kind=kind)
        engine.add_request(kind.name, "The quick", params)
    assert engine.get_num_unfinished_requests() == 3
    outputs = drain(engine)
    assert not engine.has_unfinished_requests() and engine.step() == []
    (final,) = outputs["FINAL_ONLY"]
    assert final.finished and all(sample.finished() for sample in final.outputs)

    cumulative = outputs["CUMULATIVE"]
    assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]
    for earlier, later in pairwise(cumulative):
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            assert after.text.startswith(before.text)
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert cumulative[-1].outputs == final.outputs

    for sample in final.outputs:
        deltas = [d for o in outputs["DELTA"] for d in o.outputs if d.index == sample.index]
        assert len(deltas) > 2
        assert "".join(delta.text for delta in deltas) == sample.text
        assert [t for delta in deltas for t in delta.token_ids] == sample.token_ids
        assert [p for delta in deltas for p in delta.logprobs] == sample.logprobs
        assert deltas[-1].cumulative_logprob == sample.cumulative_logprob
        reasons = [delta.finish_reason for delta in deltas]
        assert reasons == [None] * (len(deltas) - 1) + ["length"]


def test_every_step_of_a_long_prompt_is_heard_of(tiny_model: str) -> None:
    with LLMEngine(tiny_model, num_threads=1, max_num_batched_tokens=64) as engine:
        engine.add_request("a", [5] * 200, greedy(max_tokens=2))
        assert [len(engine.step()) for _ in range(5)] == [0, 0, 0, 1, 1]
        assert not engine.has_unfinished_requests()


def test_kept_outputs_do_not_grow(engine: LLMEngine) -> None:
    engine.add_request("a", "The", GREEDY)
    first = engine.step()[0]
    kept = list(first.outputs[0].token_ids)
    drain(engine)
    assert first.outputs[0].token_ids == kept


def test_aborted_request_gives_nothing_more_and_frees_everything(engine: LLMEngine) -> None:
    for name in ("a", "b", "c"):
        engine.add_request(name, "The quick", greedy(max_tokens=100))
    for _ in range(5):
        engine.step()
    assert engine.stats().num_running == 3
    engine.abort_request(["a", "unknown"])
    engine.abort_request("b")
    outputs = drain(engine)
    assert set(outputs) == {"c"}
    assert len(outputs["c"][-1].outputs[0].token_ids) == 100
    engine.add_request("d", "The quick", greedy(max_tokens=100))
    engine.step()
    engine.abort_request("d")
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)
    engine.add_request("d", "The quick", GREEDY)  # the id is free again
    assert len(drain(engine)["d"][-1].outputs[0].token_ids) == 12


def test_duplicate_id_is_refused_and_the_first_goes_on(engine: LLMEngine) -> None:
    engine.add_request("same", "The quick", GREEDY)
    with pytest.raises(ValueError, match="request_id 'same' is already in use"):
        engine.add_request("same", "other", GREEDY)
    assert len(drain(engine)["same"][-1].outputs[0].token_ids) == 12


@pytest.mark.parametrize("priority", [2**31, -(2**40), 1.5, True, None])
def test_priority_out_of_bounds_is_refused(engine: LLMEngine, priority: object) -> None:
    with pytest.raises(ValueError, match="priority must be an integer"):
        engine.add_request("p", "The", GREEDY, priority)
    assert not engine.has_unfinished_requests()


def test_priority_orders_what_waits(tiny_model: str) -> None:
    with Engine(
        tiny_model, num_threads=1, max_num_seqs=1, scheduling_policy="priority"
    ) as one_at_a_time:
        for name, priority in (("late", 5), ("first", -3), ("second", 0)):
            one_at_a_time.add_request(name, "The", GREEDY, priority)
        order = list(drain(one_at_a_time))
    assert order == ["first", "second", "late"]
