"""A tiny random Llama with a tokenizer and a chat template: a whole model directory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# More rows than the tokenizer has tokens, as real models have.
VOCAB_SIZE = 400
EOS = 1
MAX_POSITIONS = 32768  # so many that a request runs for long if nobody ends it
NUM_LAYERS = 2
HEAD_SIZE = 64

_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it is what they have said.",
    "def f(x):\n    return x + 1\n\nfor i in range(1000):\n\tprint(f(i), 12345)",
    "Größe, naïve café; 東京は日本の首都です。 Привет, мир! 🙂",
] * 4

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def block_bytes(block_size: int = 16) -> int:
    """Of one KV block in float32."""
    return 2 * NUM_LAYERS * 1 * block_size * HEAD_SIZE * 4


def forced(token_ids: Sequence[int]) -> dict[str, Any]:
    """Parameters with which a model gives these tokens in this order: each different, none of them
    in the prompt, at most 9.

    The first has the largest bias; once it is there the repetition penalty takes that away.
    """
    return {
        "temperature": 0,
        "max_tokens": len(token_ids),
        "ignore_eos": True,
        "allowed_token_ids": list(token_ids),
        "logit_bias": {str(token): 100 - 10 * i for i, token in enumerate(token_ids)},
        "repetition_penalty": 1e6,
    }


def make_tiny_model(directory: Path) -> Path:
    from checkpoints import make_model, save

    save(
        make_model(
            "llama",
            vocab_size=VOCAB_SIZE,
            num_hidden_layers=NUM_LAYERS,
            max_position_embeddings=MAX_POSITIONS,
            eos_token_id=EOS,
            bos_token_id=0,
        ),
        directory,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 20,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|bos|>",
                "eos_token": "<|eos|>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return directory
