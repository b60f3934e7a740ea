"""Token id -> bytes and kind: what the engine core needs to turn tokens into text.

The engine core knows two ways from bytes to text (``csrc/engine/token_table.h``); any other decoder
is refused here, by name, rather than decoded nearly right. Without numpy: the front ends and the
engine core's process do without it, which saves each of them 6 MB.
"""

import codecs
import json
from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import tokenizers

KIND_NORMAL, KIND_SPECIAL, KIND_BYTE = 0, 1, 2  # TokenKind

Decoding = Literal["byte_level", "byte_fallback"]
_REPLACEMENT = "\u2581"  # SentencePiece's visible space


@dataclass(frozen=True, slots=True)
class TokenTableData:
    """The arguments of the engine core's TokenTable."""

    bytes: bytes  # all tokens back to back
    offsets: "array[int]"  # [num_tokens + 1], uint32
    kinds: bytearray  # [num_tokens]
    decoding: Decoding


@dataclass(frozen=True, slots=True)
class TextDecoding:
    """How a tokenizer's decoder makes text: the part of it that works token by token."""

    decoding: Decoding
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False


def byte_level_alphabet() -> dict[int, int]:
    """Code point -> byte of GPT-2's printable alphabet (``bytes_to_unicode``, inverted).

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and up.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {b: b for b in visible} | {0x100 + i: byte for i, byte in enumerate(hidden)}


def text_decoding(backend: tokenizers.Tokenizer) -> TextDecoding:
    """Reads the tokenizer's decoder. Raises ValueError naming a decoder that is not supported.

    A leading space that the decoder strips (``Strip``, ``Metaspace``) is not part of this: the
    output goes on after a prompt, so its first token keeps its space.
    """
    if backend.decoder is None:
        raise ValueError("tokenizer has no decoder; supported: ByteLevel, Metaspace, ByteFallback")
    # The decoder as tokenizer.json has it; to_str() would write out the whole vocabulary.
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    unsupported = ValueError(
        f"tokenizer decoder {' + '.join(names)} is not supported; supported: ByteLevel; Metaspace; "
        "Replace + ByteFallback + Fuse (+ Strip of leading spaces)"
    )
    if names == ["ByteLevel"]:
        return TextDecoding("byte_level")
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not (
                byte_fallback or fused
            ):
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} if not (byte_fallback or fused):
                replacements.append((old, " "))
            case {"type": "ByteFallback"} if not (byte_fallback or fused):
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "stop": 0} if fused:
                pass
            case _:
                raise unsupported
    if not replacements and not byte_fallback:
        raise unsupported
    return TextDecoding("byte_fallback", tuple(replacements), byte_fallback)


def build_token_table(backend: tokenizers.Tokenizer) -> TokenTableData:
    """The table of all ids from 0 to the largest one; ids that stand for no token have no bytes."""
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    tokens = [""] * size
    for token, token_id in vocab.items():
        tokens[token_id] = token
    kinds = bytearray(size)
    for token_id, added in backend.get_added_tokens_decoder().items():
        if added.special:
            kinds[token_id] = KIND_SPECIAL

    how = text_decoding(backend)
    if how.decoding == "byte_level":
        pieces = _byte_level_pieces(tokens)
    else:
        pieces = _byte_fallback_pieces(tokens, kinds, how)
    offsets = array("I", accumulate(map(len, pieces), initial=0))
    return TokenTableData(b"".join(pieces), offsets, kinds, how.decoding)


def _byte_level_pieces(tokens: list[str]) -> list[bytes]:
    # The alphabet is a character set of 256 characters, which Python's codecs do in C.
    character_of = {byte: chr(code_point) for code_point, byte in byte_level_alphabet().items()}
    charmap = codecs.charmap_build("".join(character_of[byte] for byte in range(256)))
    pieces = []
    for token in tokens:
        try:
            pieces.append(codecs.charmap_encode(token, "strict", charmap)[0])
        except UnicodeEncodeError:
            # With a character outside the alphabet it is plain text, as in ByteLevel's own decoder.
            pieces.append(token.encode())
    return pieces


def _byte_fallback_pieces(tokens: list[str], kinds: bytearray, how: TextDecoding) -> list[bytes]:
    for old, new in how.replacements:
        tokens = [token.replace(old, new) for token in tokens]
    pieces = [token.encode() for token in tokens]
    if how.byte_fallback:
        for i, token in enumerate(tokens):
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    byte = int(token[3:5], 16)
                except ValueError:
                    continue
                if kinds[i] == KIND_SPECIAL:
                    raise ValueError(
                        f"token {i} ({token}) is both a byte and a special token; "
                        "that is not supported: mark it as an ordinary token"
                    )
                pieces[i] = bytes([byte])
                kinds[i] = KIND_BYTE
    return pieces
