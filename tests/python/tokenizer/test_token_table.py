"""The engine core's table, decoded by the core's rules, gives the tokenizer's own text."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from tokenizer.fixtures import Fixture
from vllm_lite.model_files import ModelFiles
from vllm_lite.token_table import (
    KIND_BYTE,
    KIND_SPECIAL,
    TokenTableData,
    build_token_table,
    byte_level_alphabet,
)
from vllm_lite.tokenizer import Tokenizer, load_tokenizer


def decode_by_table(table: TokenTableData, ids: list[int], skip: bool) -> str:
    """csrc/engine/token_table.h's rules, written out."""
    tokens = [
        (int(table.kinds[i]), table.bytes[table.offsets[i] : table.offsets[i + 1]])
        for i in ids
        if not (skip and table.kinds[i] == KIND_SPECIAL)
    ]
    if table.decoding == "byte_level":
        return b"".join(data for _, data in tokens).decode(errors="replace")
    text = ""
    for is_byte, group in itertools.groupby(tokens, key=lambda token: token[0] == KIND_BYTE):
        run = b"".join(data for _, data in group)
        try:
            text += run.decode()
        except UnicodeDecodeError:
            assert is_byte
            text += "\ufffd" * len(run)
    return text


@pytest.fixture(scope="session")
def both(byte_level: Fixture, sentence_piece: Fixture) -> list[Tokenizer]:
    return [load_tokenizer(ModelFiles(f.directory)) for f in (byte_level, sentence_piece)]


@pytest.mark.case("TOK-03")
@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_output_continues_the_prompt(
    both: list[Tokenizer], data: st.DataObject, skip: bool
) -> None:
    for tokenizer in both:
        # Mostly the interesting end of the vocabulary: special tokens and bytes.
        token = st.one_of(st.integers(0, 270), st.integers(0, tokenizer.vocab_size - 1))
        ids = data.draw(st.lists(token, max_size=25))
        prompt = tokenizer.encode("the ", add_special_tokens=False) + tokenizer.encode(
            "dog", add_special_tokens=False
        )
        before = tokenizer.decode(prompt, skip)
        whole = tokenizer.decode(prompt + ids, skip)
        assert whole == before + decode_by_table(tokenizer.token_table(), ids, skip)


@pytest.mark.case("TOK-03")
def test_first_token_keeps_its_space(both: list[Tokenizer]) -> None:
    tokenizer = both[1]
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the dog"
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == b" the dog"


def test_kinds(both: list[Tokenizer]) -> None:
    byte_level, sentence_piece = (t.token_table() for t in both)
    assert byte_level.kinds == bytes([KIND_SPECIAL] * 3 + [0] * (len(byte_level.kinds) - 3))
    assert sentence_piece.kinds[:259] == bytes([KIND_SPECIAL] * 3 + [KIND_BYTE] * 256)
    assert not any(sentence_piece.kinds[259:])
    assert both[1].token_bytes(3 + 0xE9) == b"\xe9"
    assert both[0].token_bytes(both[0].vocab_size - 1) == "«é→»".encode()
    for table in (byte_level, sentence_piece):
        assert (table.offsets.typecode, table.offsets.itemsize) == ("I", 4)
        assert len(table.offsets) == len(table.kinds) + 1
        assert table.offsets[-1] == len(table.bytes)


def test_alphabet_is_gpt2s() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = byte_level_alphabet()
    assert {chr(c) for c in alphabet} == set(ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("ďábel\n \x00🙂")
    assert bytes(alphabet[ord(c)] for c in pieces[0][0]).decode() == "ďábel\n \x00🙂"


def test_holes_in_the_vocabulary_have_no_bytes() -> None:
    backend = Backend(models.BPE({"a": 0, "b": 7}, []))
    backend.decoder = decoders.ByteLevel()
    table = build_token_table(backend)
    assert table.offsets.tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 2]
    assert table.bytes == b"ab"


def test_metaspace_without_byte_fallback_prints_byte_names() -> None:
    backend = Backend(models.BPE({"▁a": 0, "<0x0A>": 1, "b▁c": 2}, []))
    backend.decoder = decoders.Metaspace()
    table = build_token_table(backend)
    assert (table.decoding, table.kinds) == ("byte_fallback", bytes(3))
    assert backend.decode([2, 0, 1]) == "bc a<0x0A>"  # of the first token it drops every space
    assert decode_by_table(table, [0, 1, 2], True) == " a<0x0A>b c"


def test_special_byte_token_is_refused() -> None:
    backend = Backend(models.BPE({"<0x0A>": 0}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<0x0A>")])
    with pytest.raises(ValueError, match=r"<0x0A>.*both a byte and a special"):
        build_token_table(backend)


def test_smollm2_table(smollm2: Tokenizer) -> None:
    start = time.process_time()
    table = build_token_table(smollm2._backend)
    assert time.process_time() - start < 1.5  # 0.075 s measured
    assert len(table.kinds) == 49152
    assert sum(table.kinds) == 17  # the special tokens
    ids = np.random.default_rng(0).integers(0, 49152, 2000).tolist()
    assert decode_by_table(table, ids, True) == smollm2.decode(ids)
