"""The engine core as Python drives it: plans, results and outputs as bytes, errors raised."""

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from vllm_lite import _core
from vllm_lite.messages import EngineOutputs, SequenceOutput, decode_outputs
from waiting import PATIENCE

WORDS = [b"</s>", b"a", b"b", b"\xc3", b"\xa9"]


def make_core(**changes: Any) -> _core.EngineCore:
    offsets = np.cumsum([0] + [len(word) for word in WORDS]).astype(np.uint32)
    table = _core.make_token_table(
        b"".join(WORDS), offsets.tobytes(), bytes([1, 0, 0, 0, 0]), "byte_level"
    )
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 32,
        "max_num_waiting": 8,
        "max_chunk_tokens": 0,
        "policy": "fcfs",
        "num_blocks": 16,
        "block_size": 4,
        "enable_prefix_caching": True,
        "sliding_window": 0,
        "num_clients": 1,
        "async_scheduling": False,
        "num_speculative_tokens": 0,
        "prompt_lookup_min": 0,
        "prompt_lookup_max": 0,
        "max_num_logits": 0,
        "tokens": table,
    }
    return _core.EngineCore(**{**options, **changes})


def submit(core: _core.EngineCore, **changes: Any) -> None:
    request: dict[str, Any] = {
        "key": 1,
        "prompt": np.array([1, 2, 1], np.int32).tobytes(),
        "n": 1,
        "priority": 0,
        "max_tokens": 4,
        "min_tokens": 0,
        "salt": b"",
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "num_logprobs": -1,
        "seed": 2**64 - 1,
        "bias_ids": [],
        "bias_values": [],
        "allowed_ids": [],
        "stop_ids": [0],
        "eos_ids": [0],
        "stops": [],
        "include_stop": False,
        "skip_special_tokens": True,
        "constraint": b"",
        "beam_width": 0,
        "length_penalty": 1.0,
        "early_stopping": "no",
        "num_prompt_logprobs": -1,
        "prompt_logprobs_start": 0,
        "pooling": "",
    }
    core.submit(**{**request, **changes})


def result(plan: memoryview, tokens: list[int], logprob: float | None = None) -> bytes:
    """A StepResult (csrc/scheduler/step_plan.h); with a logprob: of one row, with one top entry."""
    words = np.frombuffer(plan, np.int32)
    body = list(tokens)
    if logprob is not None:
        bits = int(np.float32(logprob).view(np.int32))
        body += [bits, 1, tokens[0], bits]
    header = [0x564C5231, 12 + len(body), *words[2:4], len(tokens), 1 if logprob else -1]
    return np.array([*header, *[0] * 6, *body], np.int32).tobytes()


def take(core: _core.EngineCore) -> EngineOutputs:
    message = core.take_outputs(0)
    assert message is not None
    return decode_outputs(message)


def step(core: _core.EngineCore, token: int, logprob: float | None = None) -> SequenceOutput:
    plan = core.begin_step()
    assert plan is not None and plan.readonly
    core.finish_step(result(plan, [token], logprob))
    core.check_invariants()
    (output,) = take(core).outputs
    return output


def test_tokens_text_and_logprobs_come_out() -> None:
    core = make_core()
    assert core.begin_step() is None
    submit(core, num_logprobs=1)
    first = step(core, 1, -0.5)
    assert (first.key, first.sample_index, first.token_ids, first.text) == (1, 0, [1], "a")
    assert first.logprobs is not None and first.logprobs[0].top_logprobs == [-0.5]
    assert step(core, 3, -1.0).text == ""
    assert step(core, 4, -1.0).text == "é"
    last = step(core, 0, -1.0)
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", None)
    assert not core.has_work()
    assert (core.stats().kv_used_blocks, core.stats().num_steps) == (0, 4)


@pytest.mark.parametrize("nonsense", [b"", b"abc", bytes(64)])
def test_what_is_no_result_fails_the_step_and_raises(nonsense: bytes) -> None:
    core = make_core()
    submit(core)
    assert core.begin_step() is not None
    with pytest.raises(_core.InternalError):
        core.finish_step(nonsense)
    (output,) = take(core).outputs
    assert output.finish_reason == "error" and output.message
    submit(core, key=2, max_tokens=1)
    assert step(core, 2).finish_reason == "length"


@pytest.mark.parametrize("message", ["out of memory: é", "", "a lone surrogate: \udcff"])
def test_a_failed_step_may_say_anything(message: str) -> None:
    core = make_core()
    submit(core)
    assert core.begin_step() is not None
    core.fail_step(message)
    (output,) = take(core).outputs
    assert output.finish_reason == "error" and output.message
    assert core.begin_step() is None


def test_a_plan_keeps_the_core_alive() -> None:
    core = make_core()
    submit(core)
    plan = core.begin_step()
    assert plan is not None
    before = bytes(plan)
    del core
    gc.collect()
    assert bytes(plan) == before


def test_refusals_come_out_as_outputs() -> None:
    core = make_core()
    submit(core, prompt=np.zeros(40, np.int32).tobytes(), n=2)
    submit(core, key=2, bias_ids=[1], bias_values=[])
    assert core.begin_step() is None
    outputs = take(core).outputs
    assert [output.finish_reason for output in outputs] == ["refused"] * 3
    assert "max_model_len, which is 32" in (outputs[0].message or "")
    assert "logit_bias" in (outputs[2].message or "")


def test_what_cannot_be_answered_raises() -> None:
    core = make_core()
    for changes in ({"key": 1 << 48}, {"n": 0}, {"salt": b"short"}, {"prompt": b"abc"}):
        with pytest.raises(_core.Error):
            submit(core, **changes)
    with pytest.raises(_core.Error, match="client is 1"):
        core.take_outputs(1)
    with pytest.raises(_core.Error, match="scheduling_policy"):
        make_core(policy="random")
    with pytest.raises(_core.Error, match="max_model_len to at most 64"):
        make_core(max_model_len=100)
    assert not core.has_work()


def test_exit_when_hung_up_wants_an_open_descriptor() -> None:
    with pytest.raises(_core.Error, match="fd is -1"):
        _core.exit_when_hung_up(-1, 0)


def test_exit_when_hung_up_ends_the_process() -> None:
    code = (
        "import socket, time; from vllm_lite import _core; a, b = socket.socketpair();"
        "_core.exit_when_hung_up(a.fileno(), 7); b.close(); time.sleep(1000)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 7
