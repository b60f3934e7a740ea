"""``LLM.generate`` and ``LLM.chat`` on a tiny random model: prompts, parameters, answers."""

import pytest

from engine.calls import GREEDY, PROMPTS, ascii_ids, drain, greedy, ids_of, run
from tiny_model import EOS
from vllm_lite import LLM, RequestOutputKind, SamplingParams


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
    assert sample(-(2**63)) != sample(2**63 - 1)
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
