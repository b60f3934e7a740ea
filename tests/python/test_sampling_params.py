"""Every field of SamplingParams refuses a wrong type or range with a sentence that names it."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from vllm_lite.sampling_params import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)

NAN, INF = math.nan, math.inf
NOT_NUMBERS = [NAN, INF, -INF, "0.5", True, False, [], {}, 10**400, 1j, b"1"]
NUMBERS = {
    "temperature": [-1e-9, -1, 2.01, 1e300],
    "top_p": [0, -0.5, 1.0000001],
    "min_p": [-0.1, 1.5],
    "repetition_penalty": [0, -1.0],
    "presence_penalty": [-2.01, 3],
    "frequency_penalty": [-2.01, 3],
}
INTEGERS = {
    "n": [0, -1, MAX_SAMPLES + 1],
    "top_k": [-2, 2**31],
    "seed": [-(2**63) - 1, 2**63],
    "min_tokens": [-1, 17, 2**31],
    "max_tokens": [-1, 2**31],
    "prompt_logprobs": [-1, 21, 400, 2**31, 1.5],
    "prompt_logprobs_start": [-1, 2**31],
    "logprobs": [-1, MAX_LOGPROBS + 1],
}
REFUSED = (
    [(name, value) for name, bad in NUMBERS.items() for value in [*bad, None, *NOT_NUMBERS]]
    + [(name, value) for name, bad in INTEGERS.items() for value in [*bad, 1.0, *NOT_NUMBERS]]
    + [("n", None), ("top_k", None), ("min_tokens", None)]
    + [
        ("logit_bias", value)
        for value in [
            [1],
            {"abc": 1},
            {-1: 5},
            {"-1": 5},
            {1.0: 5},
            {True: 5},
            {5: "x"},
            {5: NAN},
            {5: 1e9},
            {5: -100.5},
            {5: None},
            {2**31: 1},
            {"9" * 5000: 1},
            {"5": 1, 5: 2},
            {"\u0665": 1},
            dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + 1), 1.0),
        ]
    ]
    + [("allowed_token_ids", v) for v in [[], 3, "12", [-1], [1.0], [True], ["1"], [2**31]]]
    + [("stop_token_ids", v) for v in [3, "12", [-1], [1.5], [False], [None], [1] * 1025]]
    + [
        ("stop", v)
        for v in [
            "",
            [""],
            3,
            [3],
            ["a", None],
            b"x",
            ["a"] * (MAX_STOP_STRINGS + 1),
            "x" * (MAX_STOP_CHARS + 1),
        ]
    ]
    + [
        (name, value)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
        for value in (1, 0, "true", None)
    ]
    + [("output_kind", 1), ("output_kind", "DELTA")]
)


@pytest.mark.case("SMP-01")
@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:30])
def test_refused_with_the_name_of_the_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}") as caught:
        SamplingParams(**{name: value})
    assert "got" in str(caught.value) or "empty" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 2, 2.0),
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", 1, 1.0),
        ("top_p", 1e-9, 1e-9),
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", np.int64(7), 7),
        ("min_p", 0, 0.0),
        ("seed", None, None),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("presence_penalty", -2, -2.0),
        ("logit_bias", {"5": 1, 7: -100}, {5: 1.0, 7: -100.0}),
        ("logit_bias", {}, {}),
        ("allowed_token_ids", (1, 2), [1, 2]),
        ("stop", "end", ["end"]),
        ("stop", [], []),
        ("stop", "x" * MAX_STOP_CHARS, ["x" * MAX_STOP_CHARS]),
        ("stop_token_ids", [0], [0]),
        ("min_tokens", 16, 16),
        ("max_tokens", None, None),
        ("logprobs", 0, 0),
        ("logprobs", MAX_LOGPROBS, MAX_LOGPROBS),
        ("n", MAX_SAMPLES, MAX_SAMPLES),
    ],
)
def test_accepted_and_normalised(name: str, value: Any, stored: Any) -> None:
    result = getattr(SamplingParams(**{name: value}), name)
    assert result == stored and type(result) is type(stored)


def test_message_names_value_and_limit() -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(temperature=NAN)
    assert str(caught.value) == "temperature must be a finite number >= 0 and <= 2, got nan"
    with pytest.raises(ValueError, match=r"top_p must be a finite number > 0 and <= 1, got 2"):
        SamplingParams(top_p=2)
    with pytest.raises(ValueError, match=r"min_tokens must be <= max_tokens \(3\), got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    SamplingParams(min_tokens=100, max_tokens=None)


def test_several_greedy_samples_are_allowed() -> None:
    assert SamplingParams(n=3, temperature=0).n == 3


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=3)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError, match="beam_width"):
        msgspec.json.decode(b'{"beam_width": 3}', type=SamplingParams)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"temperature": -1}', "temperature"),
        (b'{"top_p": "0.5"}', "top_p"),
        (b'{"n": true}', r"\$\.n"),
        (b'{"logit_bias": {"abc": 1}}', "logit_bias"),
    ],
)
def test_json_is_validated_too(body: bytes, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        msgspec.json.decode(body, type=SamplingParams)


def test_travels_as_msgpack() -> None:
    params = SamplingParams(
        temperature=0.5,
        seed=2**63 - 1,
        logit_bias={7: 1.5},
        stop=["a"],
        output_kind=RequestOutputKind.DELTA,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", {49152: 1}), ("allowed_token_ids", [1, 49152]), ("stop_token_ids", [999999])],
)
def test_token_ids_lie_below_the_width_of_the_logits(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    with pytest.raises(
        ValueError, match=f"{name} must hold token ids below 49152.*got {max(value)}"
    ):
        params.validate_for(49152)
    params.validate_for(1_000_000)


@pytest.mark.case("SMP-05")
def test_added_tokens_are_in_the_vocabulary() -> None:
    """The limit is the width of the logits, which have rows for added tokens."""
    SamplingParams(allowed_token_ids=[49151], stop_token_ids=[49151]).validate_for(49152)
    SamplingParams().validate_for(1)


# --- best_of and beam search ----------------------------------------------------------------------


def test_best_of_is_n_or_more_and_not_streamed() -> None:
    assert SamplingParams(n=2, best_of=5).num_samples == 5
    assert SamplingParams(n=2).num_samples == 2
    for value in (1, 0, -1, MAX_SAMPLES + 1, 2.0, "3", True):
        with pytest.raises(ValueError, match=r"^best_of "):
            SamplingParams(n=2, best_of=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^best_of cannot be streamed"):
        SamplingParams(n=2, best_of=3, output_kind=RequestOutputKind.DELTA)
    assert SamplingParams(n=2, best_of=2, output_kind=RequestOutputKind.DELTA).best_of == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", 1),
        ("use_beam_search", None),
        ("length_penalty", NAN),
        ("length_penalty", 10.5),
        ("length_penalty", "1"),
        ("early_stopping", None),
        ("early_stopping", 1),
        ("early_stopping", "always"),
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", 0.1),
        ("logit_bias", {1: 1.0}),
        ("allowed_token_ids", [1]),
        ("stop", ["a"]),
        ("min_tokens", 1),
        ("logprobs", 1),
        ("best_of", 3),
    ],
)
def test_beam_search_refuses_by_name_what_it_does_not_take(field: str, value: object) -> None:
    fields: dict[str, Any] = {"n": 2, "use_beam_search": True, field: value}
    with pytest.raises(ValueError, match=rf"^{field} "):
        SamplingParams(**fields)


def test_the_width_of_a_beam_search_is_bounded_by_what_a_step_looks_at() -> None:
    params = SamplingParams(n=MAX_LOGPROBS - 1, use_beam_search=True, stop_token_ids=[3])
    params.validate_for(1000, eos_token_ids=[3])
    with pytest.raises(ValueError, match=rf"^n \(beam_width\) must be at most {MAX_LOGPROBS - 2}"):
        params.validate_for(1000, eos_token_ids=[4])
    params.validate_for(MAX_LOGPROBS, eos_token_ids=[4])  # all there are


def test_beam_search_params_are_checked_when_they_are_made() -> None:
    assert BeamSearchParams(beam_width=4, max_tokens=8).sampling_params().n == 4
    for fields in (
        {"beam_width": 0},
        {"beam_width": MAX_SAMPLES + 1},
        {"max_tokens": 0},
        {"temperature": 1.0},
        {"length_penalty": INF},
        {"early_stopping": "sometimes"},
        {"ignore_eos": None},
        {"stop_token_ids": [-1]},
    ):
        (name,) = fields
        with pytest.raises(ValueError, match=rf"^{name}"):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})  # type: ignore[arg-type]
