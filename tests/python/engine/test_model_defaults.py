"""What an engine takes from the model's files: end tokens, template, length of an answer."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tiny_model import EOS, forced
from vllm_lite import LLM, SamplingParams

OTHER_END = 7  # a token of the text, not a special one


def changed_copy(tiny_model: str, directory: Path, **files: dict[str, object]) -> str:
    """A copy of the model in which JSON files have other fields; None removes one."""
    shutil.copytree(tiny_model, directory)
    for name, changes in files.items():
        path = directory / f"{name}.json"
        fields = json.loads(path.read_text()) if path.exists() else {}
        fields |= changes
        path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return str(directory)


@pytest.mark.case("NUM-16")
@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": OTHER_END}, {"eos_token_id": None}, {EOS, OTHER_END}),
        ({"eos_token_id": [OTHER_END, 9]}, {"eos_token_id": None}, {EOS, OTHER_END, 9}),
        ({"eos_token_id": None}, {"eos_token_id": 9}, {EOS, 9}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {EOS}),
    ],
    ids=["an id", "a list", "generation_config's", "the tokenizer's alone"],
)
def test_every_end_token_of_the_files_ends(
    tiny_model: str,
    tmp_path: Path,
    config: dict[str, object],
    generation: dict[str, object],
    ends: set[int],
) -> None:
    model = changed_copy(
        tiny_model, tmp_path / "model", config=config, generation_config=generation
    )
    with LLM(model, num_threads=1, max_model_len=64) as llm:
        for token in (EOS, OTHER_END, 9, 11):
            params = SamplingParams(max_tokens=3, allowed_token_ids=[token])
            sample = llm.generate("The", params, use_tqdm=False)[0].outputs[0]
            if token in ends:
                assert (sample.token_ids, sample.text) == ([token], "")
                assert sample.finish_reason == "stop"
                # Null says that it was the tokenizer's own.
                assert sample.stop_reason == (None if token == EOS else token)
            else:
                assert (sample.token_ids, sample.finish_reason) == ([token] * 3, "length")
            params = SamplingParams(max_tokens=3, allowed_token_ids=[token], ignore_eos=True)
            sample = llm.generate("The", params, use_tqdm=False)[0].outputs[0]
            assert (sample.token_ids, sample.finish_reason) == ([token] * 3, "length")


def test_without_an_end_token_of_the_tokenizer_the_files_first_is_the_one_without_a_reason(
    tiny_model: str, tmp_path: Path
) -> None:
    model = changed_copy(
        tiny_model, tmp_path / "model", config={"eos_token_id": [9, OTHER_END]},
        generation_config={"eos_token_id": None}, tokenizer_config={"eos_token": None},
    )  # fmt: skip
    with LLM(model, num_threads=1, max_model_len=64) as llm:
        for token, reason in ((9, None), (OTHER_END, OTHER_END)):
            params = SamplingParams(max_tokens=3, allowed_token_ids=[token])
            sample = llm.generate("The", params, use_tqdm=False)[0].outputs[0]
            assert (sample.finish_reason, sample.stop_reason) == ("stop", reason)


@pytest.mark.case("SMP-05", "TOK-05")
def test_added_tokens_are_allowed_and_shown_as_the_tokenizer_decodes_them(
    tiny_model: str, tmp_path: Path
) -> None:
    model = changed_copy(tiny_model, tmp_path / "model")
    path = str(tmp_path / "model/tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    base_size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<tool>", "two words"])
    tokenizer.add_special_tokens(["<|x|>"])
    tokenizer.save(path)
    words = tokenizer.encode("the dog").ids
    ids = [base_size, *words[:1], base_size + 2, base_size + 1, *words[1:2]]
    assert tokenizer.get_vocab_size() == base_size + 3
    with LLM(model, num_threads=1, max_model_len=64) as llm:
        for skip in (True, False):
            params = SamplingParams(**forced(ids), skip_special_tokens=skip)
            sample = llm.generate("12345", params, use_tqdm=False)[0].outputs[0]
            assert sample.token_ids == ids
            assert sample.text == tokenizer.decode(ids, skip_special_tokens=skip)
            assert "<tool>" in sample.text and "two words" in sample.text
            assert ("<|x|>" in sample.text) == (not skip)
        params = SamplingParams(**{**forced(ids), "stop_token_ids": [base_size + 1]})
        sample = llm.generate("12345", params, use_tqdm=False)[0].outputs[0]
        assert (sample.token_ids, sample.stop_reason) == (ids[:4], base_size + 1)


@pytest.mark.case("NUM-05")
def test_yarn_of_a_scaled_length_does_not_scale_it_again(tiny_model: str, tmp_path: Path) -> None:
    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    changes = {"max_position_embeddings": 256, "rope_parameters": yarn}
    model = changed_copy(tiny_model, tmp_path / "model", config=changes)
    with LLM(model, num_threads=1) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        output = llm.generate([[5] * 250], params, use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 6
        with pytest.raises(ValueError, match=r"prompt has 300 tokens.*max_model_len is 256"):
            llm.generate([[5] * 300], params, use_tqdm=False)


@pytest.mark.case("NUM-11")
@pytest.mark.parametrize(
    ("asked", "effective"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")]
)
def test_the_effective_dtype_is_logged(
    tiny_model: str, asked: str, effective: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm_lite")
    LLM(tiny_model, dtype=asked, num_threads=1, max_model_len=64).close()
    assert f"cpu, {effective}, max_model_len 64" in caplog.text


def test_max_new_tokens_is_the_default_length(tiny_model: str, tmp_path: Path) -> None:
    model = changed_copy(tiny_model, tmp_path / "model", generation_config={"max_new_tokens": 5})
    with LLM(model, num_threads=1, max_model_len=64) as llm:
        assert llm.get_default_sampling_params().max_tokens == 5


@pytest.mark.case("NUM-18")
def test_chat_template_file_takes_the_place_of_the_models(tiny_model: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }};{% endfor %}")
    with LLM(tiny_model, num_threads=1, max_model_len=64, chat_template=str(template)) as llm:
        chat = [{"role": "user", "content": "dog"}]
        output = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)[0]
        assert output.prompt_token_ids == llm.get_tokenizer().encode("dog;")


@pytest.mark.case("NUM-18")
def test_bad_chat_template_file_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_lite.serve import main

    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    for path, words in ((broken, "template"), (tmp_path / "none.jinja", "none.jinja")):
        assert main(["--port", "0", "--chat-template", str(path)]) == 1
        assert words in capsys.readouterr().err
