"""Builds a tokenizer from the vocabulary in a GGUF file.

A GGUF file names its pre-tokenizer (``tokenizer.ggml.pre``) but does not hold it; the splits below
are those of the models' own tokenizer.json files as llama.cpp maps them (src/llama-vocab.cpp).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

logger = logging.getLogger(__name__)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _llama3(digits: str) -> str:
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTION}|{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_TAIL}"


def _cased_words(digits: str, suffix: str) -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}"
    )


@dataclass(frozen=True)
class _PreTokenizer:
    splits: tuple[str, ...]  # each splits the pieces of the one before; all text stays
    ignore_merges: bool = False  # a whole piece in the vocabulary is one token, whatever the merges
    add_bos: bool = False  # when the file does not say


_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {}
for _names, _pre in (
    (
        "default",
        _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
    ("gpt-2 phi-2 mpt olmo jais gigachat exaone4 trillion", _PreTokenizer((_GPT2,))),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b",
        _PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 pixtral lfm2",
        _PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", _PreTokenizer((_llama3(r"\p{N}{1,3}"),))),
    (
        "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez grok-2",
        _PreTokenizer((_llama3(r"\p{N}"),)),
    ),
    (
        "tekken",
        _PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    ),
    (
        "gpt-4o llama4",
        _PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),)),
    ),
    (
        "deepseek-coder",
        _PreTokenizer(
            (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")
        ),
    ),
    (
        "deepseek-v3",
        _PreTokenizer(
            (
                r"\p{N}{1,3}",
                "[一-龥\u3040-\u30ff]+",
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
                r"""|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*""" + _TAIL,
            )
        ),
    ),
):
    for _name in _names.split():
        _PRE_TOKENIZERS[_name] = _pre


class _TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GgufTokenizer:
    """``special_ids`` maps bos, eos, eot, eom, pad and unk to ids, those that the file names."""

    backend: Tokenizer
    special_ids: dict[str, int]
    chat_templates: dict[str, str]


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Builds the tokenizer that the metadata of a GGUF file describes.

    Raises ValueError naming the tokenizer model or pre-tokenizer if it is not supported, and for
    metadata that does not hang together.
    """
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if model not in builders:
        raise ValueError(
            f"GGUF tokenizer model {model!r} is not supported; supported: {', '.join(builders)}"
        )
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if not tokens:
        raise ValueError("GGUF file has no tokens (tokenizer.ggml.tokens)")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    types = list(types) or [_TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"GGUF file has {len(tokens)} tokens but {len(types)} token types")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ValueError(f"GGUF file has token {twice!r} more than once")
    special_ids = _special_ids(metadata, len(tokens), defaults=model == "llama")
    backend, add_bos = builders[model](metadata, vocab, types, special_ids)

    always_special = {special_ids.get("bos"), special_ids.get("eos")}
    added = []
    for i, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        special = token_type in (_TokenType.CONTROL, _TokenType.UNKNOWN) or i in always_special
        if special or token_type == _TokenType.USER_DEFINED:
            added.append(AddedToken(token, special=special, normalized=False))
    backend.add_tokens(added)

    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    _set_bos_eos(
        backend,
        tokens[special_ids["bos"]] if add_bos and "bos" in special_ids else None,
        tokens[special_ids["eos"]] if add_eos and "eos" in special_ids else None,
    )
    return GgufTokenizer(backend, special_ids, _chat_templates(metadata))


def _set_bos_eos(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes ``add_special_tokens`` put ``bos`` before and ``eos`` after a text (None: nothing)."""
    template = ([bos] if bos else []) + ["$A"] + ([eos] if eos else [])
    special = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(dict.fromkeys(special))
    )


def _byte_level(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], ids: dict[str, int]
) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        logger.warning(
            "GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), using 'default'; "
            "prompts may be split unlike in training: convert the model anew"
        )
        name = "default"
    if name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"GGUF pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    if "tokenizer.ggml.merges" not in metadata:
        raise ValueError("GGUF file has no merges (tokenizer.ggml.merges)")
    pre = _PRE_TOKENIZERS[name]
    # The first character can itself be a space, so the separator is looked for after it.
    merges = []
    for merge in metadata["tokenizer.ggml.merges"]:
        separator = merge.find(" ", 1)
        merges.append((merge[:separator], merge[separator + 1 :]))
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"GGUF vocabulary and merges do not agree: {error}") from error
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentence_piece(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], ids: dict[str, int]
) -> tuple[Tokenizer, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocab):
        raise ValueError("GGUF file has no score (tokenizer.ggml.scores) for every token")
    tokens = list(vocab)
    mergeable = {
        token
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (_TokenType.UNDEFINED, _TokenType.NORMAL, _TokenType.UNUSED)
    }
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, mergeable, scores),
            byte_fallback=any(token_type == _TokenType.BYTE for token_type in types),
            fuse_unk=True,
            unk_token=tokens[ids["unk"]] if "unk" in ids else None,
        )
    )
    # Each stretch of text between special tokens gets the space, as in llama.cpp (and as in
    # transformers' "legacy" tokenizers).
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), space] if prefix else [space]
    )
    decoding = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(decoding)
    return backend, True


def _merges_from_scores(
    vocab: dict[str, int], mergeable: set[str], scores: list[float]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair that makes the best-scored piece: the pairs in that order."""
    ranked = []
    for token in mergeable:
        score = scores[vocab[token]]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-score, -cut, cut - len(token), vocab[left], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _special_ids(metadata: Mapping[str, Any], size: int, defaults: bool) -> dict[str, int]:
    ids = {"bos": 1, "eos": 2, "unk": 0} if defaults and size > 2 else {}
    keys = {
        "bos": "bos",
        "eos": "eos",
        "eot": "eot",
        "eom": "eom",
        "pad": "padding",
        "unk": "unknown",
    }
    for name, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id", ids.get(name))
        if token_id is None:
            continue
        if not 0 <= token_id < size:
            raise ValueError(
                f"GGUF {key}_token_id is {token_id}, outside the vocabulary of {size} tokens"
            )
        ids[name] = int(token_id)
    return ids


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix + "."): value
        for key, value in metadata.items()
        if key.startswith(prefix + ".") and isinstance(value, str)
    }
    if isinstance(metadata.get(prefix), str):
        templates["default"] = metadata[prefix]
    return templates
