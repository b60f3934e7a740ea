"""Log-probabilities in OpenAI's two shapes.

A token's ``bytes`` are its own, its text those bytes decoded alone: a token that holds part of a
character shows U+FFFD there, and the bytes of neighbours joined give the character.
"""

import codecs
import math
from collections.abc import Sequence

from vllm_lite.outputs import Position
from vllm_lite.server.engine import TokenizerLike
from vllm_lite.server.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobsList,
    TokenLogprob,
    TopLogprob,
)

# JSON has no infinity: a masked token's log-probability is sent as this. Finite values stay.
LOGPROB_FLOOR = -9999.0


def finite(value: float) -> float:
    return value if math.isfinite(value) else LOGPROB_FLOOR


def prompt_list(prompt: Sequence[Position | None], top: int) -> PromptLogprobsList:
    """vLLM's ``prompt_logprobs``: each token with the ``top`` likeliest."""
    shown: PromptLogprobsList = []
    for position in prompt:
        if position is None:
            shown.append(None)
            continue
        own = next(iter(position))
        shown.append(
            {
                token_id: PromptLogprob(
                    logprob=finite(entry.logprob),
                    rank=entry.rank,
                    decoded_token=entry.decoded_token,
                )
                for token_id, entry in position.items()
                if token_id == own or (entry.rank or 0) <= top
            }
        )
    return shown


class TokenTexts:
    """Token id to its text, its bytes, and whether it is special.

    Remembered: at most one entry per token of the vocabulary.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes, bool]] = {}

    def __call__(self, token_id: int) -> tuple[str, bytes, bool]:
        entry = self._known.get(token_id)
        if entry is None:
            entry = self._known[token_id] = self._look_up(token_id)
        return entry

    def _look_up(self, token_id: int) -> tuple[str, bytes, bool]:
        tokenizer = self._tokenizer
        # A model's vocabulary may be padded past the tokenizer's: those ids have no text.
        if token_id >= tokenizer.vocab_size:
            return "", b"", False
        data = tokenizer.token_bytes(token_id)
        special = not tokenizer.decode([token_id], skip_special_tokens=True) and bool(
            tokenizer.decode([token_id], skip_special_tokens=False)
        )
        return data.decode("utf-8", "replace"), data, special


class LogprobsWriter:
    """Writes one choice's log-probabilities, piece by piece in order.

    ``top``: alternatives per position. ``ids``: show tokens as ``token_id:<id>`` (vLLM's
    ``return_tokens_as_token_ids``). ``skip_special``: the choice's text is without special tokens.
    """

    def __init__(self, texts: TokenTexts, top: int, *, ids: bool, skip_special: bool) -> None:
        self._texts = texts
        self._top = top
        self._ids = ids
        self._skip_special = skip_special
        # Offsets follow the text: a character counts where its last byte arrives.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def chat(self, token_ids: list[int], positions: list[Position]) -> ChatLogprobs:
        content = []
        for token_id, position in zip(token_ids, positions, strict=True):
            top = []
            for other, logprob in self._best(position):
                text, data, _ = self._token(other)
                top.append(TopLogprob(token=text, logprob=finite(logprob), bytes=list(data)))
            text, data, _ = self._token(token_id)
            content.append(
                TokenLogprob(
                    token=text,
                    logprob=finite(position[token_id].logprob),
                    bytes=list(data),
                    top_logprobs=top,
                )
            )
        return ChatLogprobs(content=content)

    def completion(self, token_ids: list[int], positions: list[Position]) -> CompletionLogprobs:
        out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, position in zip(token_ids, positions, strict=True):
            data, special = self._add(out, token_id, position)
            if not (special and self._skip_special):
                self._offset += len(self._decoder.decode(data))
        return out

    def echo(
        self, token_ids: Sequence[int], positions: Sequence[Position | None], text: str
    ) -> CompletionLogprobs:
        """Of the prompt, which the choice's text begins with as ``text``: as it was given, so with
        the special tokens that it names and without those that the tokenizer adds.
        """
        out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, position in zip(token_ids, positions, strict=True):
            data, special = self._add(out, token_id, position)
            piece = data.decode("utf-8", "replace") if special else self._decoder.decode(data)
            # SentencePiece begins the first word with a space that a text need not have.
            if self._offset == 0 and piece.startswith(" ") and not text.startswith(" "):
                piece = piece[1:]
            if not special or text.startswith(piece, self._offset):
                self._offset += len(piece)
        self._decoder.reset()
        self._offset = len(text)
        return out

    def _add(
        self, out: CompletionLogprobs, token_id: int, position: Position | None
    ) -> tuple[bytes, bool]:
        """Adds a token's entries; (its bytes, whether it is special)."""
        text, data, special = self._token(token_id)
        chosen: float | None = None
        top: dict[str, float] | None = None
        if position is not None:
            chosen, top = finite(position[token_id].logprob), {}
            # Two tokens may share a text (parts of characters); the likelier one keeps the key.
            for other, logprob in self._best(position):
                top.setdefault(self._token(other)[0], finite(logprob))
            # OpenAI adds the chosen token when it is not among the top.
            top.setdefault(text, chosen)
        out.tokens.append(text)
        out.token_logprobs.append(chosen)
        out.top_logprobs.append(top)
        out.text_offset.append(self._offset)
        return data, special

    def _token(self, token_id: int) -> tuple[str, bytes, bool]:
        text, data, special = self._texts(token_id)
        return (f"token_id:{token_id}" if self._ids else text), data, special

    def _best(self, position: Position) -> list[tuple[int, float]]:
        """The ``top`` likeliest, likeliest first.

        The engine adds the chosen token when it is not one of them; here it is left out again.
        """
        if not self._top:
            return []
        ranked = sorted(
            position.items(),
            key=lambda item: (-finite(item[1].logprob), item[1].rank or 0, item[0]),
        )
        return [(token_id, entry.logprob) for token_id, entry in ranked[: self._top]]
