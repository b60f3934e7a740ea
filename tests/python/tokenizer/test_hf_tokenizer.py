"""Tokenizers out of HF directories behave as transformers' own loading of the same directory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tokenizer.fixtures import BOS_TEMPLATE, CORPUS, Fixture, save_directory
from vllm_lite.model_files import ModelFiles
from vllm_lite.tokenizer import Tokenizer, load_tokenizer

KINDS = ["byte_level", "sentence_piece"]
MESSAGES = [{"role": "user", "content": "Hi <tool call>"}, {"role": "assistant", "content": "é 🙂"}]


@pytest.fixture(scope="session")
def pairs(
    byte_level: Fixture, sentence_piece: Fixture
) -> dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]]:
    directories = {"byte_level": byte_level.directory, "sentence_piece": sentence_piece.directory}
    return {
        kind: (load_tokenizer(ModelFiles(path)), AutoTokenizer.from_pretrained(path))
        for kind, path in directories.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(
    text=st.one_of(
        st.text(max_size=50),
        st.lists(st.sampled_from(["<s>", "<|eos|>", "<tool call>", "«é→»", " ", "the", "日"])).map(
            "".join
        ),
    )
)
def test_encode_and_decode_as_transformers(
    pairs: dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]], kind: str, text: str
) -> None:
    ours, reference = pairs[kind]
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == reference.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_as_transformers(
    pairs: dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]], kind: str
) -> None:
    ours, reference = pairs[kind]
    assert ours.vocab_size == len(reference)
    assert ours.bos_token_id == reference.bos_token_id
    assert ours.eos_token_id == reference.eos_token_id
    assert ours.pad_token_id == reference.pad_token_id
    assert ours.chat_template == reference.chat_template == BOS_TEMPLATE
    assert ours.special_tokens == reference.special_tokens_map


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.case("TPL-01")
def test_chat_prompts_have_exactly_one_bos(
    pairs: dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]], kind: str
) -> None:
    """A template that prints BOS on a tokenizer that adds it used to give two."""
    ours, reference = pairs[kind]
    ids = ours.encode_chat(MESSAGES)
    assert ids == reference.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert ids.count(ours.bos_token_id) == 1 and ids[0] == ours.bos_token_id
    assert ours.encode_chat(MESSAGES, add_special_tokens=True) == ids


@pytest.mark.case("TOK-06")
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_special_tokens_undoes_encoding(
    pairs: dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]], kind: str
) -> None:
    ours = pairs[kind][0]
    for text in (*CORPUS, "  two  spaces ", "<tool call>", "日本 🙂\n"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.case("TPL-01")
def test_bos_that_the_template_does_not_print_is_added(
    pairs: dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]],
) -> None:
    plain = "{{ messages[0]['content'] }}"
    with_bos, without_bos = pairs["sentence_piece"][0], pairs["byte_level"][0]
    assert with_bos.encode_chat(MESSAGES[:1], chat_template=plain) == with_bos.encode(
        MESSAGES[0]["content"]
    )
    ids = without_bos.encode_chat(MESSAGES[:1], chat_template=plain)
    assert without_bos.bos_token_id not in ids


def test_raw_prompts_follow_the_tokenizer(
    pairs: dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]],
) -> None:
    ours = pairs["sentence_piece"][0]
    assert ours.encode("") == [1]
    assert ours.encode("", add_special_tokens=False) == []
    assert ours.encode("<s>the")[:2] == [1, 1]  # nothing is silently taken away


def test_parts_give_the_same_ids_as_the_joined_text(
    pairs: dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]],
) -> None:
    ours = pairs["byte_level"][0]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("user", "system", "assistant", "tool"):
        assert ours.encode_chat([{"role": role, "content": parts}]) == ours.encode_chat(
            [{"role": role, "content": "a\nb"}]
        )


def test_tokens_that_only_the_config_declares(byte_level: Fixture, tmp_path: Path) -> None:
    """And a truncation that was saved in tokenizer.json is not applied to prompts."""
    backend = Backend.from_file(str(byte_level.directory / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    size = backend.get_vocab_size()
    config = {
        "bos_token": "<|bos|>",
        "eos_token": "<|turn|>",
        "add_bos_token": True,
        "added_tokens_decoder": {
            str(size): {"content": "<|turn|>", "special": True, "normalized": False},
            str(size + 1): {"content": "<think>", "special": False, "normalized": False},
        },
        "additional_special_tokens": ["<think>"],
    }
    files = save_directory(tmp_path / "hf", backend, config)
    ours = load_tokenizer(files)
    reference = AutoTokenizer.from_pretrained(files.path)
    for text in (CORPUS[0], "<think>a<|turn|>"):
        assert ours.encode(text) == reference.encode(text, truncation=False, padding=False)
    ids = ours.encode("<think>a")
    assert ids[0] == size + 1 and ours.eos_token_id == size
    assert ours.decode(ids, skip_special_tokens=True) == reference.decode(
        ids, skip_special_tokens=True
    )
    assert ours.vocab_size == size + 2


def test_special_tokens_map_fills_what_the_config_leaves_out(
    byte_level: Fixture, tmp_path: Path
) -> None:
    files = save_directory(tmp_path / "hf", byte_level.reference, {"bos_token": None})
    (files.path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>"})
    )
    ours = load_tokenizer(files)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (0, 1, None)


@pytest.mark.case("NUM-18")
def test_where_templates_are_found(byte_level: Fixture, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    files = save_directory(tmp_path / "hf", byte_level.reference, {"chat_template": named})
    ours = load_tokenizer(files)
    user = [{"role": "user", "content": "x"}]
    assert ours.render_chat(user) == "d"
    assert ours.render_chat(user, tools=[{"type": "function"}]) == "t"
    assert ours.render_chat(user, chat_template="tool_use") == "t"
    (files.path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert load_tokenizer(files).render_chat(user) == "j"
    (files.path / "chat_template.jinja").write_text("f")
    assert load_tokenizer(files).render_chat(user) == "f"


@pytest.mark.case("NUM-18")
def test_no_template_says_how_to_give_one(byte_level: Fixture, tmp_path: Path) -> None:
    ours = load_tokenizer(save_directory(tmp_path / "hf", byte_level.reference, {}))
    assert ours.chat_template is None
    with pytest.raises(ValueError, match=r"no chat template.*--chat-template"):
        ours.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), "Metaspace"),
        (None, "no decoder"),
    ],
)
def test_decoder_that_is_not_supported_is_named(
    byte_level: Fixture, tmp_path: Path, decoder: decoders.Decoder | None, name: str
) -> None:
    backend = Backend.from_file(str(byte_level.directory / "tokenizer.json"))
    backend.decoder = decoder
    with pytest.raises(ValueError, match=name):
        load_tokenizer(save_directory(tmp_path / "hf", backend, {}))


def test_damaged_and_missing_files_are_named(byte_level: Fixture, tmp_path: Path) -> None:
    directory = tmp_path / "hf"
    shutil.copytree(byte_level.directory, directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(ModelFiles(directory))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(ModelFiles(directory))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json or tokenizer\.model"):
        load_tokenizer(ModelFiles(directory))
    (directory / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"cannot convert tokenizer\.model"):
        load_tokenizer(ModelFiles(directory))


def test_config_that_contradicts_the_vocabulary_is_refused(
    byte_level: Fixture, tmp_path: Path
) -> None:
    config = {"added_tokens_decoder": {"5": {"content": "<|new|>"}}}
    with pytest.raises(ValueError, match=r"'<\|new\|>' the id 5"):
        load_tokenizer(save_directory(tmp_path / "hf", byte_level.reference, config))


def test_bad_arguments(pairs: dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]]) -> None:
    ours = pairs["byte_level"][0]
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        ours.encode("a\ud800")
    with pytest.raises(ValueError, match="lone surrogate"):
        ours.encode_batch(["a", "\udfff"])
    with pytest.raises(ValueError, match="got -1"):
        ours.decode([3, -1])
    with pytest.raises(TypeError, match="got bytes"):
        ours.encode(b"a")  # type: ignore[arg-type]
    assert ours.decode([ours.vocab_size, 10**9]) == ""
    assert ours.token_bytes(ours.vocab_size) == b""


def test_special_flag_is_kept_with_stripping(byte_level: Fixture, tmp_path: Path) -> None:
    backend = Backend.from_file(str(byte_level.directory / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<end>", lstrip=True, rstrip=True, normalized=False)])
    ours = load_tokenizer(save_directory(tmp_path / "hf", backend, {"eos_token": "<end>"}))
    assert ours.encode("a  <end>  b") == backend.encode("a<end>b").ids


def test_the_api_server_does_not_import_torch() -> None:
    """transformers imports torch, which costs the API server seconds and hundreds of megabytes."""
    modules = "tokenizer, model_files, chat_template, sampling_params, token_table"
    code = (
        f"from vllm_lite import {modules}; import sys; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
