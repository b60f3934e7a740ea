"""What an engine takes from the model's files: end tokens, template, length of an answer."""

import json
import shutil
from pathlib import Path

import pytest

from tiny_model import EOS
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
            assert (sample.finish_reason == "stop") == (token in ends), token


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
