"""The engine's detokenizer, stop matcher and ring, held against the tokenizers library."""

import os
import random
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from vllm_lite._core import (
    Detokenizer,
    ShmRing,
    StopAutomaton,
    StopMatcher,
    TextDecoding,
    TokenKind,
    TokenTable,
)

TEXT = (
    "The quick brown fox jumps over the lazy dog. Größe, naïve café, Ελληνικά, русский текст, "
    "日本語のテキスト, 한국어, 😀😃👩‍👩‍👧 emoji, ∀x: x² ≥ 0 — “quotes” … and\ttabs\nand lines\n\n"
)


def make_table(tokens: list[tuple[bytes, TokenKind]], decoding: TextDecoding) -> TokenTable:
    offsets = [0]
    for text, _ in tokens:
        offsets.append(offsets[-1] + len(text))
    kinds = bytes(int(kind) for _, kind in tokens)
    return TokenTable(b"".join(text for text, _ in tokens), offsets, kinds, decoding)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable bytes stand for themselves, the rest follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def make_byte_level() -> tuple[Tokenizer, TokenTable]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.add_special_tokens(["<|im_end|>", AddedToken("<| spaced special |>", special=True)])
    tokenizer.add_tokens(["<tool>", AddedToken("two words"), "日本"])

    alphabet = byte_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    tokens = []
    for i in range(tokenizer.get_vocab_size()):
        text = tokenizer.id_to_token(i)
        special = i in added and added[i].special
        # A token with one character outside the alphabet (added ones can have that) is plain text.
        plain = any(c not in alphabet for c in text)
        data = text.encode() if plain else bytes(alphabet[c] for c in text)
        tokens.append((data, TokenKind.SPECIAL if special else TokenKind.NORMAL))
    return tokenizer, make_table(tokens, TextDecoding.BYTE_LEVEL)


def make_byte_fallback() -> tuple[Tokenizer, TokenTable]:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += ["▁", "▁the", "the", "a", "é", "日", "😀", "▁▁", "x▁y", "\n", "�"]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<image>"])
    tokenizer.add_tokens(["<tool>"])

    added = tokenizer.get_added_tokens_decoder()
    tokens = []
    for i in range(tokenizer.get_vocab_size()):
        text = tokenizer.id_to_token(i)
        if len(text) == 6 and text.startswith("<0x"):
            tokens.append((bytes([int(text[3:5], 16)]), TokenKind.BYTE))
        else:
            special = i in added and added[i].special
            kind = TokenKind.SPECIAL if special else TokenKind.NORMAL
            tokens.append((text.replace("▁", " ").encode(), kind))
    return tokenizer, make_table(tokens, TextDecoding.BYTE_FALLBACK)


TOKENIZERS = {"byte_level": make_byte_level(), "byte_fallback": make_byte_fallback()}


def decode_in_groups(table: TokenTable, groups: list[list[int]], skip: bool) -> str:
    detokenizer = Detokenizer(table, skip)
    text = "".join(detokenizer.append(group) for group in groups)
    tail = detokenizer.preview_tail()
    assert detokenizer.finish() == tail
    return text + tail


def cut(ids: list[int], cuts: set[int]) -> list[list[int]]:
    marks = [0, *sorted(c for c in cuts if c < len(ids)), len(ids)]
    return [ids[a:b] for a, b in pairwise(marks)]


@pytest.mark.case("TOK-03", "TOK-05")
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decode_of_random_ids_equals_the_tokenizers(name: str, skip: bool, data: st.DataObject):
    tokenizer, table = TOKENIZERS[name]
    # A little past the vocabulary: models have more rows than the tokenizer has tokens.
    ids = data.draw(st.lists(st.integers(0, len(table) + 2), max_size=30))
    cuts = data.draw(st.sets(st.integers(1, 29), max_size=8))
    want = tokenizer.decode(ids, skip_special_tokens=skip)
    assert decode_in_groups(table, cut(ids, cuts), skip) == want


@pytest.mark.case("TOK-01", "TOK-03")
@pytest.mark.parametrize("skip", [True, False])
def test_byte_runs_of_valid_and_broken_characters_equal_the_tokenizers(skip: bool):
    """Runs that are mostly valid: uniformly random bytes hardly ever are."""
    tokenizer, table = TOKENIZERS["byte_fallback"]
    first_byte = tokenizer.token_to_id("<0x00>")
    others = [tokenizer.token_to_id(t) for t in ["</s>", "<image>", "<tool>", "the", "é", "▁", "�"]]
    rng = random.Random(7)
    characters = "aé日😀\n�"
    num_replaced = num_clean = 0
    for _ in range(4000):
        ids: list[int] = []
        for _ in range(rng.randrange(1, 8)):
            run = bytearray(rng.choice(characters).encode())
            if rng.random() < 0.15:
                run[rng.randrange(len(run))] = rng.randrange(256)
            if rng.random() < 0.1:
                run.pop()
            ids += [first_byte + b for b in run]
            if rng.random() < 0.3:
                ids.insert(rng.randrange(len(ids) + 1), rng.choice(others))
        want = tokenizer.decode(ids, skip_special_tokens=skip)
        cuts = {rng.randrange(len(ids) + 1) for _ in range(3)} - {0}
        num_replaced += "�" in want
        num_clean += "�" not in want
        assert decode_in_groups(table, cut(ids, cuts), skip) == want
    assert min(num_replaced, num_clean) > 300


@pytest.mark.case("TOK-01", "TOK-05")
@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_texts_round_trip_one_token_at_a_time(skip: bool):
    tokenizer, table = TOKENIZERS["byte_level"]
    text = "<|im_start|>naïve 👩‍👩‍👧 日本語<|im_end|> <tool>two words</tool>𓀀𓀁\x00\n"
    ids = tokenizer.encode(text).ids
    detokenizer = Detokenizer(table, skip)
    pieces = [detokenizer.append([i]) for i in ids]
    assert detokenizer.finish() == ""
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert "" in pieces, "some characters are longer than their tokens"
    if not skip:
        assert "".join(pieces) == text


def test_ids_outside_the_table_have_no_text():
    _, table = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(table, False)
    assert detokenizer.append([-1, len(table), 2**31 - 1, -(2**31)]) == ""
    assert table.bytes(-1) == b"" == table.bytes(len(table))


def test_a_detokenizer_keeps_its_table_alive():
    detokenizer = Detokenizer(
        make_table([(b"abc", TokenKind.NORMAL)] * 1000, TextDecoding.BYTE_LEVEL), True
    )
    assert detokenizer.append([0, 999]) == "abcabc"


def test_a_table_that_does_not_fit_is_refused():
    with pytest.raises((RuntimeError, ValueError), match="offsets has 1 entries for 2 kinds"):
        TokenTable(b"ab", [0], bytes(2), TextDecoding.BYTE_LEVEL)
    with pytest.raises((RuntimeError, ValueError), match="byte token of 2 bytes"):
        make_table([(b"ab", TokenKind.BYTE)], TextDecoding.BYTE_FALLBACK)
    with pytest.raises((RuntimeError, ValueError), match=r"stop\[1\] is an empty string"):
        StopAutomaton(["a", ""])


texts = st.text(alphabet="abé😀\n", max_size=40)


@pytest.mark.case("STP-01")
@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(texts, max_size=8),
    stops=st.lists(st.text(alphabet="abé😀\n", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_stop_matcher_equals_a_search_of_the_whole(
    pieces: list[str], stops: list[str], include: bool
):
    whole = "".join(pieces)
    found = [(whole.find(s) + len(s), whole.find(s), i) for i, s in enumerate(stops) if s in whole]
    matcher = StopMatcher(StopAutomaton(stops), include)
    out = ""
    for piece in pieces:
        foreseen = matcher.would_match(piece)
        index, text = matcher.append(piece)
        assert index == foreseen
        out += text
        if index >= 0:
            end, begin, want = min(found)
            assert index == want
            assert out == whole[: end if include else begin]
            return
    assert not found
    assert out + matcher.finish() == whole


def test_ring_carries_messages_between_threads():
    fd = ShmRing.create(num_slots=2, max_message_bytes=64)
    writer, reader = ShmRing(fd), ShmRing(fd)
    os.close(fd)
    assert reader.peek(timeout_ms=0) is None

    def write() -> None:
        for i in range(100):
            assert writer.push(b"%d" % i, timeout_ms=60000)
        writer.close()

    thread = threading.Thread(target=write)
    thread.start()
    for i in range(100):
        # Without the release of the GIL the writer would never get to write.
        message = reader.peek(timeout_ms=60000)
        assert message is not None and message.readonly and bytes(message) == b"%d" % i
        reader.release()
    with pytest.raises(EOFError):
        reader.peek(timeout_ms=60000)
    thread.join()
    assert reader.closed
    with pytest.raises(EOFError):
        writer.push(b"", timeout_ms=0)


def test_ring_times_out_when_full_and_takes_any_buffer():
    fd = ShmRing.create(1, 8)
    ring = ShmRing(fd)
    os.close(fd)
    assert ring.max_message_bytes == 8
    assert ring.push(memoryview(bytearray(b"12345678")), 0)
    start = time.monotonic()
    assert not ring.push(b"x", 20)
    assert time.monotonic() - start >= 0.02
    with pytest.raises((RuntimeError, ValueError), match="longer than max_message_bytes"):
        ring.push(bytes(9), 0)
    with pytest.raises((RuntimeError, ValueError), match="contiguous"):
        ring.push(memoryview(b"12345678")[::2], 0)
    message = ring.peek(0)
    del ring  # the view keeps the mapping
    assert message is not None and bytes(message) == b"12345678"


def test_ring_refuses_what_is_none():
    read_end, write_end = os.pipe()
    try:
        with pytest.raises((RuntimeError, ValueError), match="holds no ring"):
            ShmRing(read_end)
    finally:
        os.close(read_end)
        os.close(write_end)
