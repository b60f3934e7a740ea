"""Small tokenizers of both kinds, each as an HF directory and as a GGUF file."""

import json

import pytest
from gguf import TokenType
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tokenizer.fixtures import (
    BOS_TEMPLATE,
    CORPUS,
    Fixture,
    bos_processor,
    save_directory,
    write_gguf,
)
from vllm_lite.model_files import find_model
from vllm_lite.tokenizer import Tokenizer as OurTokenizer
from vllm_lite.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    """GPT-2's kind: three special tokens, two added ones that are not special, no BOS added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|bos|>", "<|eos|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<tool call>", "«é→»")])
    root = tmp_path_factory.mktemp("byte_level")
    save_directory(
        root / "hf",
        tokenizer,
        {
            "bos_token": "<|bos|>",
            "eos_token": {"__type": "AddedToken", "content": "<|eos|>"},
            "pad_token": "<|pad|>",
            "chat_template": BOS_TEMPLATE,
        },
    )
    vocab = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [int(TokenType.NORMAL)] * len(vocab)
    types[:3] = [int(TokenType.CONTROL)] * 3
    types[-2:] = [int(TokenType.USER_DEFINED)] * 2
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    gguf = root / "model.gguf"
    write_gguf(
        gguf, "gpt2", vocab, types, merges=[" ".join(m) for m in merges], bos=0, eos=1, pad=2
    )
    return Fixture(root / "hf", gguf, tokenizer, vocab, [], types)


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    """Llama 2's kind: byte fallback, a space before the text, BOS added."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, "<tool call>"]
    # SentencePiece scores merged pieces 0, -1, -2, ... in the order of training.
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1000.0]
    types = [int(TokenType.UNKNOWN), *[int(TokenType.CONTROL)] * 2, *[int(TokenType.BYTE)] * 256]
    types += [int(TokenType.NORMAL)] * len(pieces) + [int(TokenType.USER_DEFINED)]

    ids = {token: i for i, token in enumerate(vocab)}
    merges = json.loads(trained.to_str())["model"]["merges"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[tuple(merge) for merge in merges],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    tokenizer.post_processor = bos_processor("<s>", 1)
    root = tmp_path_factory.mktemp("sentence_piece")
    save_directory(
        root / "hf",
        tokenizer,
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": BOS_TEMPLATE,
        },
    )
    gguf = root / "model.gguf"
    write_gguf(gguf, "llama", vocab, types, scores=scores, bos=1, eos=2, unk=0)
    return Fixture(root / "hf", gguf, tokenizer, vocab, scores, types)


@pytest.fixture(scope="session")
def smollm2() -> OurTokenizer:
    try:
        files = find_model("smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return load_tokenizer(files)
