"""What the Python API refuses, and that it names field, value and limit."""

from typing import Any

import pytest

from engine.calls import GREEDY, greedy, ids_of, run
from tiny_model import EOS, MAX_POSITIONS, VOCAB_SIZE, block_bytes
from vllm_lite import LLM, BeamSearchParams, Engine, SamplingParams


@pytest.mark.case("LEN-01", "LEN-05")
@pytest.mark.parametrize("length", [254, 255])
def test_prompt_that_leaves_room_for_a_token_runs(llm: LLM, length: int) -> None:
    sample = run(llm, [5] * length)[0].outputs[0]
    assert len(sample.token_ids) == 256 - length and sample.finish_reason == "length"


@pytest.mark.case("LEN-01")
@pytest.mark.parametrize("length", [256, 257, 10000])
def test_prompt_over_the_limit_names_limit_prompt_and_output(llm: LLM, length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} tokens.*max_tokens 12.*max_model_len is 256"):
        run(llm, ["The", [5] * length])


@pytest.mark.case("API-05", "API-06")
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([[]], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ([1, VOCAB_SIZE, 5], f"prompt token 1 is {VOCAB_SIZE}: .* 0 to {VOCAB_SIZE - 1}"),
        ([[1, -1]], "prompt token 1 is -1"),
        ([[2**62]], f"prompt token 0 is {2**62}"),
        ([[3.7]], "prompt token 0 is 3.7"),
        ([[1, True]], "prompt token 1 is True"),
        ([["a"]], "prompt token 0 is 'a'"),
        ({"promt": "x"}, "unsupported keys: promt"),
        ({}, "needs 'prompt'"),
        ({"prompt": 5}, "prompt must be a string"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a string"),
        ([5.5], "got float"),
        ([None], "got NoneType"),
        ("\ud800", "lone surrogate at character 0"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt must be valid Unicode"),
        (b"abc", "got bytes"),
        ([bytearray(b"abc")], "got bytearray"),
        ({"prompt_token_ids": b"abc"}, "prompt_token_ids must be a list"),
    ],
)
def test_bad_prompt_is_a_value_error_and_the_engine_goes_on(
    llm: LLM, prompt: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(llm, prompt)
    assert not llm.engine.has_unfinished_requests()
    assert len(ids_of(run(llm, [VOCAB_SIZE - 1]))[0]) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {999999: 5}}, f"logit_bias .*below {VOCAB_SIZE}.*999999"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, f"allowed_token_ids .*below {VOCAB_SIZE}"),
        ({"stop_token_ids": [VOCAB_SIZE]}, f"stop_token_ids .*below {VOCAB_SIZE}"),
        ({"n": 7}, "n is 7.*max_num_waiting is 6"),
        ({"min_tokens": 2, "stop_token_ids": list(range(VOCAB_SIZE))}, "^min_tokens must be 0"),
        (
            {"min_tokens": 2, "allowed_token_ids": [5, 6, 5], "stop_token_ids": [6, 5]},
            "^min_tokens must be 0",
        ),
        (
            {"min_tokens": 1, "allowed_token_ids": [EOS], "ignore_eos": False},
            "^min_tokens must be 0",
        ),
    ],
)
def test_parameters_that_do_not_fit_this_engine(
    llm: LLM, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(llm, ["The", "dog"], [GREEDY, greedy(**options)])
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {-1: 5}}, "logit_bias key .*-1"),
        ({"logit_bias": {"abc": 1}}, "logit_bias key .*abc"),
        ({"logit_bias": {5: "x"}}, r"logit_bias\[5\].*'x'"),
        ({"logit_bias": {5: 1e9}}, r"logit_bias\[5\].*<= 100"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": float("inf")}, "min_p"),
        ({"temperature": -1}, "temperature"),
        ({"repetition_penalty": "0.5"}, "repetition_penalty"),
        ({"temperature": True}, "temperature"),
        ({"stop": ["a", "\ud800"]}, r"stop\[1\] must be valid Unicode"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty must be .* 1e-06"),
        ({"repetition_penalty": 1e39}, "repetition_penalty must be .* 1e.06"),
        ({"presence_penalty": 1e39}, "presence_penalty"),
        ({"frequency_penalty": -1e39}, "frequency_penalty"),
        ({"logit_bias": {5: 1e39}}, "logit_bias"),
    ],
)
def test_parameters_that_fit_no_engine(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": MAX_POSITIONS + 1}, f"{MAX_POSITIONS + 1} .*{MAX_POSITIONS}"),
        (
            {"kv_cache_memory": 4 * block_bytes()},
            "max_model_len 32768 .*kv_cache_memory.*at most 64",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs must be .* from 1"),
        ({"max_num_seqs": "8"}, "max_num_seqs must be an integer.*'8'"),
        ({"num_threads": True}, "num_threads must be an integer"),
        ({"num_threads": 4097}, "num_threads must be an integer from 1 to 4096, got 4097"),
        ({"block_size": 24}, "block_size must be a power of two, got 24"),
        ({"block_size": 8}, "block_size must be an integer from 16 to 256, got 8"),
        ({"block_size": 512}, "block_size must be an integer from 16 to 256, got 512"),
        ({"dtype": "float8"}, "dtype must be one of .*float8"),
        (
            {"kv_cache_dtype": "int4"},
            "kv_cache_dtype must be one of auto, fp8, int8, int8_per_token_head, got 'int4'",
        ),
        (
            {"kv_cache_dtype": "fp8", "device": "cpu"},
            "kv_cache_dtype fp8 is not supported on the CPU: use --kv-cache-dtype auto or int8, or",
        ),
        (
            {"kv_cache_dtype": "int8", "device": "cuda", "dtype": "bfloat16"},
            "kv_cache_dtype int8 is not supported on CUDA: use --kv-cache-dtype auto or fp8, or",
        ),
        ({"scheduling_policy": "sjf"}, "scheduling_policy must be one of"),
        ({"max_num_waiting": 2**31}, "max_num_waiting must be"),
        ({"step_timeout": float("nan")}, "step_timeout"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching"),
        ({"max_num_seqs": 65536}, "max_num_seqs must be .* to 65535, got 65536"),
        ({"kv_cache_memory": 1024}, "kv_cache_memory is 1024: set --kv-cache-memory to at least"),
        (
            {"kv_cache_memory": 2**31 * block_bytes()},
            f"makes {2**31} blocks.*to at most {(2**31 - 1) * block_bytes()}",
        ),
    ],
)
def test_engine_option_out_of_bounds_names_itself(
    tiny_model: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model, **options)


def test_unknown_option_and_unknown_model(tiny_model: str) -> None:
    with pytest.raises(TypeError, match="max_modle_len"):
        Engine(tiny_model, max_modle_len=5)
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        LLM("no-such-model")


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [None], "x"])
def test_what_is_no_sampling_params_is_named(llm: LLM, params: object) -> None:
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate(["The"], params, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("prompts", [None, 1, True, 1.5, [None], [b"a"], {1: 2}])
def test_what_is_no_prompt_is_named(llm: LLM, prompts: Any) -> None:
    beams = BeamSearchParams(beam_width=1, max_tokens=1)
    for ask in (llm.generate, llm.embed, lambda given: llm.beam_search(given, beams)):
        with pytest.raises(ValueError, match="prompt"):
            ask(prompts)
    with pytest.raises(ValueError, match="messages"):
        llm.chat(prompts)


def test_params_of_another_kind_are_named(llm: LLM) -> None:
    with pytest.raises(TypeError, match="pooling_params must be PoolingParams"):
        llm.embed("a", GREEDY)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params must be BeamSearchParams"):
        llm.beam_search("a", GREEDY)  # type: ignore[arg-type]
    message = {"role": "user", "content": "x"}
    for options in ({"tools": 5}, {"chat_template_kwargs": 5}):
        with pytest.raises(ValueError, match=r"tools must be|arguments must be"):
            llm.chat([message], GREEDY, False, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tool_calls must be a list"):
        llm.chat([{**message, "tool_calls": 5}], GREEDY, False)


@pytest.mark.parametrize("value", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [0, 1e-45, 1, 2])
def test_the_furthest_penalties_leave_logits_finite(
    llm: LLM, value: float, temperature: float
) -> None:
    params = greedy(repetition_penalty=value, temperature=temperature)
    assert len(ids_of(run(llm, "The the The", params))[0]) == 12


def test_chat_of_deeply_nested_objects_is_refused(llm: LLM) -> None:
    def nested(levels: int) -> object:
        value: object = 1
        for _ in range(levels):
            value = {"a": [value]} if levels % 2 else [value]
        return value

    def chat(depth: int, **options: Any) -> None:
        message = {"role": "user", "content": "x"}
        tool_call = {"function": {"name": "f", "arguments": options.pop("arguments", "{}")}}
        llm.chat([{**message, "tool_calls": [tool_call]}], GREEDY, False, **options)

    chat(0, chat_template_kwargs={"x": nested(100)})
    for depth in (102, 600, 5000):
        with pytest.raises(ValueError, match="x is nested more than 100 levels"):
            chat(0, chat_template_kwargs={"x": nested(depth)})
        with pytest.raises(ValueError, match="tools is nested more than 100 levels"):
            chat(0, tools=[{"function": nested(depth)}])
        with pytest.raises(ValueError, match=r"messages\[0\] is nested more than 100"):
            chat(0, arguments=nested(depth))
        with pytest.raises(ValueError, match=r"arguments is (nested more|not valid)"):
            chat(0, arguments='{"a":' * depth + "1" + "}" * depth)
