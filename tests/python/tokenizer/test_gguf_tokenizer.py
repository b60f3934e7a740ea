"""Tokenizers out of GGUF files split and merge as the models' own tokenizers do."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tokenizer.fixtures import CORPUS, Fixture, write_gguf
from vllm_lite.gguf_file import GgufFile
from vllm_lite.model_files import ModelFiles, find_model
from vllm_lite.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "   leading and trailing   ",
    "2026",
    "x²½٣ 1,234.5",
    "\u00a0nbsp\u2003em\u200bzero",
    "e\u0301 n\u0303 👩‍👩‍👧‍👦 🇨🇿",
    "it's IT'S we'll I'd don't",
    "\r\n\r\n\t\t \n x",
    "a\x00b\x7f\x80",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture(scope="module")
def smollm2_reference() -> Backend:
    """SmolLM2 as its own tokenizer.json has it: single digits, then GPT-2's byte-level split."""
    try:
        path = find_model("smollm2").path
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with GgufFile(path) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        merges = [tuple(m.split(" ")) for m in file.metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:17])
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_encodes_as_its_own_tokenizer(
    smollm2: Tokenizer, smollm2_reference: Backend, text: str
) -> None:
    assert smollm2.encode(text) == smollm2_reference.encode(text).ids
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@cache
def smollm2_bytes(smollm2: Tokenizer) -> set[bytes]:
    return {smollm2.token_bytes(i) for i in range(smollm2.vocab_size)}


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_smollm2_encodes_any_text_as_its_own_tokenizer(
    smollm2: Tokenizer, smollm2_reference: Backend, text: str
) -> None:
    ids = smollm2.encode(text)
    assert ids == smollm2_reference.encode(text).ids
    decoded = smollm2.decode(ids, skip_special_tokens=False)
    assert decoded == smollm2_reference.decode(ids, skip_special_tokens=False)
    # SmolLM2's vocabulary lacks a few bytes (0xF1, for one), which its tokenizer drops.
    if all(bytes([byte]) in smollm2_bytes(smollm2) for byte in text.encode()):
        assert decoded == text
    assert smollm2.encode_batch([text, "x"]) == [ids, smollm2.encode("x")]


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert [smollm2.token_bytes(i) for i in smollm2.encode("2026")] == [b"2", b"0", b"2", b"6"]
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    assert smollm2.eos_token_ids == [2]
    assert smollm2.encode("<|im_end|>") == [2]  # and no BOS: the file says add_bos_token = false
    assert smollm2.encode_chat([{"role": "user", "content": "Hi"}])[-4:] == smollm2.encode(
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "It's IT'S 12345,  ok\n\n x", "It|'s|ĠIT|'|S|Ġ12345|,|Ġ|Ġok|ĊĊ|Ġx"),
        ("smollm", "It's IT'S 12345,  ok\n\n x", "It|'s|ĠIT|'|S|Ġ|1|2|3|4|5|,|Ġ|Ġok|ĊĊ|Ġx"),
        ("llama-bpe", "It's IT'S 12345,  ok\n\n x", "It|'s|ĠIT|'S|Ġ|123|45|,|Ġ|Ġok|ĊĊ|Ġx"),
        ("llama-bpe", "(hello)\n\n", "(hello|)ĊĊ"),
        ("qwen2", "It's IT'S 12345,  ok\n\n x", "It|'s|ĠIT|'S|Ġ|1|2|3|4|5|,|Ġ|Ġok|ĊĊ|Ġx"),
        ("tekken", "HelloWorld 12 a/\n", "Hello|World|Ġ|1|2|Ġa|/Ċ"),
        ("gpt-4o", "HelloWorld'S 1234", "Hello|World'S|Ġ|123|4"),
        ("deepseek-coder", "a 1234\nb", "a|Ġ|1|2|3|4|Ċ|b"),
        ("deepseek-v3", "a 1234 東京x!foo", "a|Ġ|123|4|Ġ|æĿ±äº¬|x|!foo"),
        ("default", "ab, 12345", "ab|,|Ġ|123|45"),
    ],
)
def test_pre_tokenizer_splits(
    byte_level: Fixture, tmp_path: Path, pre: str, text: str, pieces: str
) -> None:
    files = write_gguf(tmp_path / "m.gguf", "gpt2", byte_level.vocab, byte_level.types, pre)
    backend = load_tokenizer(files)._backend
    assert backend.pre_tokenizer is not None
    assert "|".join(p for p, _ in backend.pre_tokenizer.pre_tokenize_str(text)) == pieces


@pytest.mark.parametrize("text", [*TEXTS, "a<tool call>b «é→»<|eos|>c"])
def test_byte_level_gguf_is_the_same_tokenizer_as_the_directory(
    byte_level: Fixture, text: str
) -> None:
    gguf = load_tokenizer(ModelFiles(byte_level.gguf))
    assert gguf.encode(text) == byte_level.reference.encode(text).ids
    for skip in (True, False):
        ids = gguf.encode(text)
        expected = byte_level.reference.decode(ids, skip_special_tokens=skip)
        assert gguf.decode(ids, skip_special_tokens=skip) == expected
    directory = load_tokenizer(ModelFiles(byte_level.directory)).token_table()
    table = gguf.token_table()
    assert (table.bytes, table.decoding) == (directory.bytes, directory.decoding)
    assert (table.offsets, table.kinds) == (directory.offsets, directory.kinds)


def sentence_piece_encode(fixture: Fixture, text: str) -> list[int]:
    """SentencePiece's BPE by its definition: merge the adjacent pair with the best-scored union."""
    ids = {token: i for i, token in enumerate(fixture.vocab)}
    normal = {t for t, kind in zip(fixture.vocab, fixture.types, strict=True) if kind == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [a + b for a, b in pairwise(parts)]
        known = [(fixture.scores[ids[u]], -i) for i, u in enumerate(unions) if u in normal]
        if not known:
            break
        at = -max(known)[1]
        parts[at : at + 2] = [unions[at]]
    out: list[int] = []
    for part in parts:
        if part in normal:
            out.append(ids[part])
        else:
            out += [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return out


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=40), st.text("aefhinort 日ě.", max_size=40)))
def test_sentence_piece_gguf_merges_by_score(sentence_piece: Fixture, text: str) -> None:
    tokenizer = load_sentence_piece(sentence_piece)
    ids = tokenizer.encode(text)
    assert ids == [1, *sentence_piece_encode(sentence_piece, text)]
    if "▁" not in text:
        assert tokenizer.decode(ids) == text


_loaded: dict[Path, Tokenizer] = {}


def load_sentence_piece(fixture: Fixture) -> Tokenizer:
    if fixture.gguf not in _loaded:
        _loaded[fixture.gguf] = load_tokenizer(ModelFiles(fixture.gguf))
    return _loaded[fixture.gguf]


def test_sentence_piece_flags(sentence_piece: Fixture, tmp_path: Path) -> None:
    files = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        sentence_piece.vocab,
        sentence_piece.types,
        scores=sentence_piece.scores,
        add_bos=False,
        add_eos=True,
        add_space_prefix=False,
        eot=258,
    )
    tokenizer = load_tokenizer(files)
    with_prefix = load_sentence_piece(sentence_piece)
    assert tokenizer.encode(" the")[:-1] == with_prefix.encode("the")[1:]
    assert tokenizer.encode("the")[-1] == 2
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"  # nothing is stripped
    assert tokenizer.eos_token_ids == [2, 258]
    # bos, eos and unk have llama.cpp's defaults when the file does not name them.
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


def test_special_and_user_defined_tokens(sentence_piece: Fixture) -> None:
    tokenizer = load_sentence_piece(sentence_piece)
    ids = tokenizer.encode("a</s><tool call>b", add_special_tokens=False)
    assert 2 in ids and len(sentence_piece.vocab) - 1 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool call> b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a</s><tool call> b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "no-such"}, "'no-such'.*llama-bpe"),
        ({"model": "bert"}, "'bert'.*gpt2"),
        ({"model": "llama"}, "no score"),
        ({"tokens": ["t", "a", "t"]}, "token 't' more than once"),
        ({"types": [1]}, "token types"),
        ({"merges": ["q zz"]}, "merges do not agree"),
        ({"bos": 70}, "bos_token_id is 70"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {
        "model": "gpt2",
        "tokens": ["Ġ", "t", "Ġt"],
        "types": [int(TokenType.NORMAL)] * 3,
    }
    files = write_gguf(tmp_path / "m.gguf", **{**arguments, **changes})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        load_tokenizer(files)


def test_gguf_holds_the_template(byte_level: Fixture) -> None:
    config = json.loads((byte_level.directory / "tokenizer_config.json").read_text())
    assert load_tokenizer(ModelFiles(byte_level.gguf)).chat_template == config["chat_template"]
