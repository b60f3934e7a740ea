"""Text that cannot fit is refused before it is tokenised, which would take seconds."""

import pytest

from vllm_lite.model_files import find_model
from vllm_lite.tokenizer import load_tokenizer


def test_text_beyond_what_the_context_can_hold_is_refused_by_its_bytes() -> None:
    tokenizer = load_tokenizer(find_model("smollm2"))
    text = "a b " * 1_000_000
    tokenizer.max_tokens = 100
    with pytest.raises(ValueError, match=r"4000000 bytes.*100 tokens"):
        tokenizer.encode(text)
    with pytest.raises(ValueError, match="max_model_len"):
        tokenizer.encode_chat([{"role": "user", "content": text}])


def test_text_of_the_longest_tokens_is_not_refused() -> None:
    tokenizer = load_tokenizer(find_model("smollm2"))
    longest = max(range(tokenizer.vocab_size), key=lambda token: len(tokenizer.token_bytes(token)))
    text = tokenizer.token_bytes(longest).decode()
    ids = tokenizer.encode(text)
    tokenizer.max_tokens = len(ids)
    assert tokenizer.encode(text) == ids
