"""The public Python API on a tiny random model: ``LLM``, ``LLMEngine``, and what they refuse."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tiny_model import EOS, MAX_POSITIONS, VOCAB_SIZE, block_bytes
from vllm_lite import (
    LLM,
    Engine,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from vllm_lite.errors import EngineDeadError

PROMPTS = ["The quick", "def f(x):", "Größe", "東京", "lazy dog, and", "it is", "12345", "café"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, num_threads=1, max_num_waiting=6, max_model_len=256) as made:
        yield made


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options})


def run(llm: LLM, prompts: object, params: object = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def ascii_ids(llm: LLM) -> list[int]:
    tokens = ((i, llm.get_tokenizer().token_bytes(i)) for i in range(EOS + 1, VOCAB_SIZE))
    return [i for i, data in tokens if data and all(32 < byte < 127 for byte in data)]


# --- prompts and their answers --------------------------------------------------------------------


def test_every_form_of_a_prompt_gives_the_same_answer(llm: LLM) -> None:
    text = "The quick brown"
    token_ids = llm.get_tokenizer().encode(text)
    outputs = [
        run(llm, text)[0],
        run(llm, token_ids)[0],
        run(llm, tuple(token_ids))[0],
        run(llm, [token_ids])[0],
        run(llm, {"prompt": text})[0],
        run(llm, [{"prompt_token_ids": token_ids}])[0],
        run(llm, {"prompt": text, "prompt_token_ids": token_ids})[0],
    ]
    expected = outputs[0].outputs[0]
    assert len(expected.token_ids) == 12
    assert expected.text == llm.get_tokenizer().decode(expected.token_ids)
    for output in outputs:
        assert output.prompt_token_ids == token_ids
        assert output.finished and output.error is None
        assert output.outputs[0].token_ids == expected.token_ids
        assert output.outputs[0].text == expected.text
        assert output.outputs[0].finish_reason == "length"
    assert [output.prompt for output in outputs] == [text, None, None, None, text, None, text]


def test_more_prompts_than_may_wait_keep_their_order(llm: LLM) -> None:
    assert llm.engine.config.max_num_waiting == 6
    prompts = [prompt + " " + other for prompt in PROMPTS for other in PROMPTS[:3]]
    outputs = run(llm, prompts)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.error is None for output in outputs)
    assert ids_of(outputs)[::7] == [ids_of(run(llm, prompt))[0] for prompt in prompts[::7]]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert run(llm, []) == []


def test_one_sampling_params_per_prompt(llm: LLM) -> None:
    params = [greedy(max_tokens=length) for length in (3, 9, 1)]
    outputs = run(llm, PROMPTS[:3], params)
    assert [len(ids) for ids in ids_of(outputs)] == [3, 9, 1]
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        run(llm, PROMPTS[:3], params[:2])
    with pytest.raises(ValueError, match="1 priorities for 3 prompts"):
        llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False, priority=[1])


def test_without_sampling_params_the_models_defaults_hold(llm: LLM) -> None:
    output = llm.generate("The", use_tqdm=False)[0]
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_progress_bar_only_when_asked(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    llm.generate(PROMPTS[:2], GREEDY)
    captured = capfd.readouterr()
    assert captured.out == "" and "2/2" in captured.err


def test_chat_of_one_conversation_and_of_several(llm: LLM) -> None:
    question = [{"role": "user", "content": "the dog"}]
    longer = [
        {"role": "system", "content": "it is"},
        *question,
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": "fox"},
    ]
    one = llm.chat(question, GREEDY, use_tqdm=False)
    both = llm.chat([longer, question], GREEDY, use_tqdm=False)
    rendered = "[user] the dog\n[assistant] "
    assert one[0].prompt_token_ids == llm.get_tokenizer().encode(rendered)
    assert ids_of(one) == ids_of(run(llm, rendered))
    assert len(both) == 2 and ids_of(both)[1] == ids_of(one)[0]
    without = llm.chat(question, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert without[0].prompt_token_ids == llm.get_tokenizer().encode("[user] the dog\n")


def test_n_samples_are_those_of_n_seeds(llm: LLM) -> None:
    params = greedy(temperature=1.0, seed=5, n=3)
    output = run(llm, "The quick", params)[0]
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    alone = [run(llm, "The quick", greedy(temperature=1.0, seed=5 + i)) for i in range(3)]
    assert ids_of([output]) == [ids_of(one)[0] for one in alone]
    assert len({tuple(ids) for ids in ids_of([output])}) == 3


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def sample(seed: int | None) -> list[int]:
        return ids_of(run(llm, "The", greedy(temperature=1.0, seed=seed)))[0]

    assert sample(7) == sample(7) == sample(7 - 2**64 + 2**63 + 2**63)
    assert sample(7) != sample(8)
    assert sample(-1) == sample(2**64 - 1)
    assert len({tuple(sample(None)) for _ in range(4)}) == 4


@pytest.mark.case("STP-03", "STP-05")
def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = greedy(allowed_token_ids=ascii_ids(llm), max_tokens=40)
    text = run(llm, "The", params)[0].outputs[0].text
    stop = text[20:24]
    end = text.index(stop)
    stopped = greedy(allowed_token_ids=ascii_ids(llm), max_tokens=40, stop=["never there", stop])
    sample = run(llm, "The", stopped)[0].outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text[:end], "stop", stop)
    kept = greedy(
        allowed_token_ids=ascii_ids(llm), max_tokens=40, stop=stop, include_stop_str_in_output=True
    )
    assert run(llm, "The", kept)[0].outputs[0].text == text[: end + len(stop)]


@pytest.mark.case("STP-03", "STP-05")
def test_stop_token_and_eos(llm: LLM) -> None:
    plain = ids_of(run(llm, "The"))[0]
    stop = plain[6]
    sample = run(llm, "The", greedy(stop_token_ids=[stop, stop]))[0].outputs[0]
    assert sample.token_ids == plain[: plain.index(stop) + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    forced = SamplingParams(temperature=0, logit_bias={EOS: 100}, max_tokens=5)
    sample = run(llm, "The", forced)[0].outputs[0]
    assert (sample.token_ids, sample.text) == ([EOS], "")
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    minimum = SamplingParams(temperature=0, logit_bias={EOS: 100}, max_tokens=5, min_tokens=3)
    assert run(llm, "The", minimum)[0].outputs[0].token_ids[3:] == [EOS]


@pytest.mark.case("STP-06")
def test_a_stop_string_before_min_tokens_is_ignored_and_a_later_one_stops(llm: LLM) -> None:
    options = {"allowed_token_ids": ascii_ids(llm), "repetition_penalty": 1.1, "max_tokens": 60}
    plain = ids_of(run(llm, "test/", greedy(**options)))[0]
    pieces = [llm.get_tokenizer().token_bytes(token).decode() for token in plain]
    early = set("".join(pieces[:19]))
    end = next(i for i in range(19, 60) if early & set(pieces[i]))
    stop = next(character for character in pieces[end] if character in early)
    for n in (1, 2):
        params = greedy(**options, stop=[stop], min_tokens=20, n=n)
        for sample in run(llm, "test/", params)[0].outputs:
            assert sample.token_ids == plain[: end + 1] and len(sample.token_ids) >= 20
            assert sample.text == "".join(pieces[:end]) + pieces[end].partition(stop)[0]
            assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


@pytest.mark.case("STP-06")
def test_stop_ids_and_eos_are_masked_before_min_tokens(llm: LLM) -> None:
    for stop, options in (
        (7, {"stop_token_ids": [7]}),
        (EOS, {"ignore_eos": False}),
    ):
        params = greedy(logit_bias={stop: 100}, min_tokens=20, max_tokens=40, **options)
        sample = run(llm, "test/", params)[0].outputs[0]
        assert len(sample.token_ids) == 21 and sample.token_ids.index(stop) == 20
        assert sample.finish_reason == "stop"


@pytest.mark.case("STP-08")
@pytest.mark.parametrize("included", [True, False])
def test_a_stop_across_two_tokens_keeps_one_entry_of_logprobs_per_token(
    llm: LLM, included: bool
) -> None:
    options = {"allowed_token_ids": ascii_ids(llm), "repetition_penalty": 1.1, "max_tokens": 40}
    plain = ids_of(run(llm, "The", greedy(**options)))[0]
    pieces = [llm.get_tokenizer().token_bytes(token).decode() for token in plain]
    text = "".join(pieces)
    # The last character of one token and the first of the next, which nothing before them makes.
    end, stop = next(
        (i + 1, pair)
        for i in range(5, 39)
        if text.find(pair := pieces[i][-1] + pieces[i + 1][0]) == len("".join(pieces[: i + 1])) - 1
    )
    for kind in RequestOutputKind:
        params = greedy(
            **options, logprobs=1, stop=stop, include_stop_str_in_output=included, output_kind=kind
        )
        llm.engine.add_request("a", "The", params)
        outputs = [output.outputs[0] for output in drain(llm.engine)["a"]]
        if kind is not RequestOutputKind.DELTA:
            outputs = outputs[-1:]
        ids = [token for output in outputs for token in output.token_ids]
        logprobs = [entry for output in outputs for entry in output.logprobs]
        assert ids == plain[: end + 1] and len(logprobs) == len(ids)
        assert all(token in entry for token, entry in zip(ids, logprobs, strict=True))
        expected = text[: text.index(stop) + (len(stop) if included else 0)]
        assert "".join(output.text for output in outputs) == expected
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)


def test_min_tokens_beyond_the_context_is_cut_with_max_tokens(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, logit_bias={EOS: 100}, max_tokens=None, min_tokens=2**31 - 1
    )
    sample = run(llm, [5] * 250, params)[0].outputs[0]
    assert len(sample.token_ids) == 6 and EOS not in sample.token_ids
    assert sample.finish_reason == "length"


def test_logprobs_have_the_chosen_token_and_the_likeliest(llm: LLM) -> None:
    sample = run(llm, "The", greedy(temperature=1.0, seed=3, logprobs=4))[0].outputs[0]
    assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids)
    total = 0.0
    for token, position in zip(sample.token_ids, sample.logprobs, strict=True):
        assert next(iter(position)) == token
        assert 4 <= len(position) <= 5
        by_rank = sorted(position.values(), key=lambda entry: entry.rank or 0)
        values = [entry.logprob for entry in by_rank]
        assert values == sorted(values, reverse=True) and values[0] < 0
        assert [entry.rank for entry in by_rank][:4] == [1, 2, 3, 4]
        for candidate, entry in position.items():
            text = llm.get_tokenizer().token_bytes(candidate).decode(errors="replace")
            assert entry.decoded_token == text
        total += position[token].logprob
    assert sample.cumulative_logprob == pytest.approx(total, abs=1e-4)

    only_chosen = run(llm, "The", greedy(logprobs=0))[0].outputs[0]
    assert [list(p) for p in only_chosen.logprobs] == [[t] for t in only_chosen.token_ids]
    none = run(llm, "The")[0].outputs[0]
    assert none.logprobs is None and none.cumulative_logprob is None


# --- what is refused ------------------------------------------------------------------------------


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


# --- LLMEngine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[LLMEngine]:
    args = EngineArgs(model=tiny_model, num_threads=1, max_model_len=256)
    with LLMEngine.from_engine_args(args) as made:
        assert type(made) is LLMEngine
        assert args.max_model_len == made.config.max_model_len == 256
        yield made


def drain(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


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


# --- rows of a batch do not touch each other ------------------------------------------------------

MIXED = [
    {},
    {"allowed_token_ids": [7, 8, 9, 10, 11, 12, 13]},
    {"logit_bias": {20: 100.0, 21: 99.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 11},
    {"logit_bias": {EOS: 100.0}, "ignore_eos": False, "min_tokens": 4},
    {"logprobs": 3},
    {"n": 2, "temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
]


@pytest.mark.case("SMP-08")
def test_mixed_requests_equal_their_solo_runs(llm: LLM) -> None:
    params = [greedy(**options) for options in MIXED]
    together = run(llm, PROMPTS, params)
    for output, prompt, param in zip(together, PROMPTS, params, strict=True):
        assert ids_of([output]) == ids_of(run(llm, prompt, param)), param


@pytest.mark.case("SMP-06")
def test_a_row_keeps_nothing_of_the_request_before_it(tiny_model: str) -> None:
    """The first request uses a row for a short time; the last gets it while the second runs on."""
    first, second, third = PROMPTS[:3]
    with LLM(tiny_model, num_threads=1, max_num_seqs=2) as two_rows:
        for after in MIXED:
            params = greedy(**after)
            alone = [ids_of(run(two_rows, prompt, params)) for prompt in (second, third)]
            for before in MIXED:
                short = greedy(**{**before, "max_tokens": 5, "n": 1})
                outputs = run(two_rows, [first, second, third], [short, params, params])
                assert [ids_of([output]) for output in outputs[1:]] == alone, (before, after)


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.case("WRK-03")
def test_a_failed_step_ends_its_requests_and_others_go_on(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_lite.worker.worker import Worker

    launch = Worker.launch
    calls = 0

    def failing(worker: Worker, plan: memoryview) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room for activations")
        return launch(worker, plan)

    expected = drained_ids(engine, "unharmed")
    monkeypatch.setattr(Worker, "launch", failing)
    engine.add_request("harmed", "The", greedy(n=2, temperature=1))
    outputs = []
    while not outputs or not outputs[-1].finished:
        outputs += engine.step()
        if len(outputs) == 1:
            assert outputs[0].error is None
    last = outputs[-1]
    assert last.error == "MemoryError: no room for activations"
    assert [sample.finish_reason for sample in last.outputs] == ["error", "error"]
    assert 1 <= len(last.outputs[0].token_ids) <= 2  # what had come before is kept
    assert "no room for activations" in caplog.text
    assert drained_ids(engine, "unharmed") == expected
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)


def drained_ids(engine: Engine, name: str) -> list[int]:
    engine.add_request(name, "The quick", GREEDY)
    return drain(engine)[name][-1].outputs[0].token_ids


@pytest.mark.case("WRK-03")
def test_llm_returns_the_others_when_one_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_lite.worker.worker import Worker

    launch = Worker.launch
    monkeypatch.setattr(llm.engine.config, "max_num_waiting", 1)  # so that they run one by one
    calls = 0

    def failing(worker: Worker, plan: memoryview) -> object:
        nonlocal calls
        calls += 1
        if calls == 14:
            raise RuntimeError("one step fails")
        return launch(worker, plan)

    expected = ids_of(run(llm, PROMPTS[:3]))
    monkeypatch.setattr(Worker, "launch", failing)
    outputs = run(llm, PROMPTS[:3])
    assert [output.error for output in outputs] == [None, "RuntimeError: one step fails", None]
    assert ids_of(outputs)[::2] == expected[::2]
    assert outputs[1].outputs[0].finish_reason == "error"


def test_full_queue_is_an_error_of_the_whole_request(tiny_model: str) -> None:
    with Engine(tiny_model, num_threads=1, max_num_seqs=1, max_num_waiting=2) as engine:
        for name in ("a", "b", "c", "d"):
            engine.add_request(name, "The", greedy(n=1 if name != "d" else 2))
        outputs = {name: made[-1] for name, made in drain(engine).items()}
        assert set(outputs) == {"a", "b", "c", "d"}
        failed = {name for name, output in outputs.items() if output.error}
        assert "d" in failed and "a" not in failed
        for name in failed:
            assert "waiting queue is full (2 sequences)" in outputs[name].error
            assert {sample.finish_reason for sample in outputs[name].outputs} == {"error"}


def test_interrupt_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_lite import _core
    from vllm_lite.worker.worker import Worker

    expected = ids_of(run(llm, PROMPTS[:2]))
    launch = Worker.launch
    for when in ("before", "after"):
        calls = 0

        def interrupted(worker: Worker, plan: memoryview, when: str = when) -> object:
            nonlocal calls
            calls += 1
            result = launch(worker, plan) if when == "after" or calls != 3 else None
            if calls == 3:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(Worker, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS[:4])
        monkeypatch.setattr(Worker, "launch", launch)
        assert not llm.engine.has_unfinished_requests()
        assert ids_of(run(llm, PROMPTS[:2])) == expected
        assert llm.engine.stats().kv_used_blocks == 0
    # An interrupt may also come between two lines, while a step is planned and not yet run.
    core: _core.EngineCore = llm.engine.client._core
    llm.engine.add_request("x", "The", GREEDY)
    assert core.begin_step() is not None
    with pytest.raises(_core.InternalError):
        llm.engine.step()  # plans twice, which fails, and the step is given up
    llm.engine.abort_request("x")
    assert ids_of(run(llm, PROMPTS[:2])) == expected


# --- life and end ---------------------------------------------------------------------------------


def test_use_after_close_raises_and_close_twice_does_not(tiny_model: str) -> None:
    llm = LLM(tiny_model, num_threads=1)
    run(llm, "The")
    llm.close()
    llm.close()
    for call in (
        lambda: run(llm, "The"),
        lambda: llm.engine.add_request("a", "The", GREEDY),
        lambda: llm.engine.step(),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    llm.engine.abort_request("a")
    assert llm.engine.stats().num_running == 0


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [None], "x"])
def test_what_is_no_sampling_params_is_named(llm: LLM, params: object) -> None:
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate(["The"], params, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("value", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [0, 1e-45, 1, 1e30])
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


def test_closing_in_another_thread_ends_generate(tiny_model: str) -> None:
    llm = LLM(tiny_model, num_threads=1)
    timer = threading.Timer(0.3, llm.close)
    timer.start()
    with pytest.raises(EngineDeadError, match="closed while it was generating"):
        llm.generate("The", greedy(max_tokens=None), use_tqdm=False)
    timer.join()
    with pytest.raises(RuntimeError, match="closed"):
        run(llm, "The")


def test_two_engines_at_once_do_not_disturb_each_other(llm: LLM, tiny_model: str) -> None:
    expected = ids_of(run(llm, PROMPTS))
    with LLM(tiny_model, num_threads=1, max_num_batched_tokens=8) as other:
        assert ids_of(run(other, PROMPTS)) == expected
        assert ids_of(run(llm, PROMPTS)) == expected
    assert ids_of(run(llm, PROMPTS)) == expected


def test_engine_made_in_a_thread_and_used_from_several(tiny_model: str) -> None:
    made: list[LLM] = []
    maker = threading.Thread(target=lambda: made.append(LLM(tiny_model, num_threads=1)))
    maker.start()
    maker.join()
    expected = ids_of(run(made[0], PROMPTS))
    results: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        results[index] = ids_of(run(made[0], PROMPTS))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), expected)
    made[0].close()


def test_multiprocess_engine_gives_the_same_tokens(llm: LLM, tiny_model: str) -> None:
    expected = run(llm, PROMPTS, greedy(logprobs=2))
    with Engine(tiny_model, multiprocess=True, num_threads=1, max_model_len=256) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, greedy(logprobs=2))
        outputs = drain(engine)
        for index, output in enumerate(expected):
            here, there = output.outputs[0], outputs[str(index)][-1].outputs[0]
            assert (there.token_ids, there.text) == (here.token_ids, here.text)
            # Torch may add up in another order when other rows share the step.
            assert there.cumulative_logprob == pytest.approx(here.cumulative_logprob, abs=1e-3)
        engine.add_request("x", "The", greedy(max_tokens=200))
        engine.step()
        engine.abort_request("x")
        assert drained_ids(engine, "y") == ids_of(run(llm, "The quick"))[0]
        pids = [child.process.pid for child in engine.client._processes.children]
        assert len(pids) == 2
    assert all(child.process.poll() is not None for child in engine.client._processes.children)
