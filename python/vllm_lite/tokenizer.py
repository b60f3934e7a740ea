"""Text to token ids and back, for HF directories and GGUF files.

Imports neither torch nor transformers: the API server lives on this module.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from vllm_lite.chat_template import render, select_template
from vllm_lite.gguf_file import GgufFile
from vllm_lite.gguf_tokenizer import build_gguf_tokenizer
from vllm_lite.model_files import ModelFiles
from vllm_lite.token_table import TokenTableData, build_token_table

logger = logging.getLogger(__name__)

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """A model's tokenizer. Thread-safe but for setting ``chat_template`` or ``max_tokens``.

    ``vocab_size`` is the largest token id plus one, added tokens included; the model's logits can
    be wider. ``eos_token_ids`` holds ``eos_token_id`` and the end-of-turn ids that a GGUF file
    names. ``chat_template`` is one template, or named templates, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        end_of_turn_ids: Sequence[int] = (),
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        """``special_tokens``: token text by name (bos_token, eos_token, pad_token, ...)."""
        # A tokenizer.json can hold the truncation of whoever saved it.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        # What encode accepts at most, if whoever uses the tokens has a limit.
        self.max_tokens: int | None = None
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.pad_token_id = self._special_id("pad_token")
        ends = [] if self.eos_token_id is None else [self.eos_token_id]
        self.eos_token_ids = list(dict.fromkeys([*ends, *end_of_turn_ids]))
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        empty = backend.encode("").ids
        self._adds_bos = self.bos_token_id is not None and empty[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens that stand in the text are taken as such.

        Raises ValueError for text that is not valid Unicode (lone surrogates), or so long that
        ``max_tokens`` tokens cannot hold it.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        for text in texts:
            _check_text(text)
            self._check_length(text)
        # Without offsets: half the time, and the interpreter stays free for other threads.
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def _check_length(self, text: str) -> None:
        """Refuses what is certainly too long before it is tokenised, which takes its time."""
        if self.max_tokens is None or len(text) <= self.max_tokens:
            return
        num_bytes = len(text.encode())
        limit = self.max_tokens * self._longest_token
        if num_bytes > limit:
            raise ValueError(
                f"the text has {num_bytes} bytes, but the context of {self.max_tokens} tokens "
                f"(max_model_len) holds at most {limit}: shorten it"
            )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token."""
        return max((end - start for start, end in pairwise(self._table.offsets)), default=1)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The tokenizer's own decode of a whole text; ids beyond the vocabulary have no text.

        A SentencePiece tokenizer strips the leading space here, while an output keeps it, since it
        goes on after a prompt. transformers' clean_up_tokenization_spaces is not applied: it
        removes spaces that the model wrote. Raises ValueError for negative ids.
        """
        if (smallest := min(ids, default=0)) < 0:
            raise ValueError(f"token ids must be >= 0, got {smallest}")
        size = self.vocab_size
        return self._backend.decode(
            [i for i in ids if i < size], skip_special_tokens=skip_special_tokens
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt ids of a conversation.

        Takes render_chat's arguments. If the tokenizer puts BOS before texts, the result begins
        with exactly one, whether the template prints it or not; other special tokens are added only
        with ``add_special_tokens``.
        """
        text = self.render_chat(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
        )
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        if self._adds_bos and (bos := self.bos_token_id) is not None:
            if ids[:1] != [bos]:
                ids.insert(0, bos)
            elif add_special_tokens and ids[:2] == [bos, bos]:
                del ids[0]
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        ``chat_template``: the name of one of the tokenizer's templates, or a template, in place of
        the tokenizer's own. Raises ChatTemplateError (a ValueError) if there is no template or it
        cannot be rendered, and for malformed messages.
        """
        template = select_template(self.chat_template, chat_template, tools is not None)
        return render(
            template,
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self.special_tokens,
            template_kwargs=template_kwargs,
        )

    def token_table(self) -> TokenTableData:
        """Raises ValueError naming a decoder that the engine core does not know."""
        return self._table

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes; empty for ids that stand for no token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        table = self._table
        return table.bytes[table.offsets[token_id] : table.offsets[token_id + 1]]

    @cached_property
    def _table(self) -> TokenTableData:
        return build_token_table(self._backend)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Loads a model's tokenizer.

    Raises FileNotFoundError if there is none, ValueError if it is damaged or of a kind that is not
    supported; the message names the file and the kind.
    """
    loader = _load_gguf if files.is_gguf else _load_directory
    try:
        tokenizer = loader(files.path)
        tokenizer.token_table()  # refuses here what could not be decoded later
    except ValueError as error:
        raise ValueError(f"{files.path}: {error}") from error
    return tokenizer


def _load_gguf(path: Path) -> Tokenizer:
    with GgufFile(path) as file:
        built = build_gguf_tokenizer(file.metadata)
        tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    special_tokens = {
        f"{name}_token": tokens[token_id]
        for name, token_id in built.special_ids.items()
        if f"{name}_token" in _SPECIAL_NAMES
    }
    ends = [built.special_ids[name] for name in ("eot", "eom") if name in built.special_ids]
    return Tokenizer(
        built.backend,
        special_tokens=special_tokens,
        end_of_turn_ids=ends,
        chat_template=_one_or_named(built.chat_templates),
    )


def _load_directory(path: Path) -> Tokenizer:
    config = _read_json(path / "tokenizer_config.json")
    # Older files: what tokenizer_config.json does not say.
    config = _read_json(path / "special_tokens_map.json") | {
        key: value for key, value in config.items() if value is not None
    }
    special_tokens = {
        name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None
    }
    if (path / "tokenizer.json").is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        # add_bos_token and add_eos_token are not looked at: as in transformers, the post-processor
        # in tokenizer.json decides.
        _add_configured_tokens(backend, config, special_tokens)
    else:
        backend, special_tokens = _convert_with_transformers(path)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=_one_or_named(_directory_templates(path, config)),
    )


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Adds what tokenizer_config.json declares beyond tokenizer.json, as transformers does."""
    known = backend.get_added_tokens_decoder()
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    for token_id, declared in sorted(
        (int(key), value) for key, value in config.get("added_tokens_decoder", {}).items()
    ):
        token = tokenizers.AddedToken(**{key: declared[key] for key in fields if key in declared})
        old = known.get(token_id)
        if old is None or any(getattr(old, key) != getattr(token, key) for key in fields):
            backend.add_tokens([token])
        if (actual := backend.token_to_id(token.content)) != token_id:
            raise ValueError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, "
                f"tokenizer.json gives it {actual}"
            )
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, Mapping) else extra
    known = backend.get_added_tokens_decoder()
    is_special = {token.content: token.special for token in known.values()}
    missing = [text for text in special_tokens.values() if not is_special.get(text)]
    # What is declared as an added token above keeps the flag it has there.
    missing += [text for text in map(_token_text, extra) if text and text not in is_special]
    for text in dict.fromkeys(missing):
        backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True)])


def _convert_with_transformers(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    sources = ("tokenizer.model", "spiece.model", "vocab.json")
    source = next((name for name in sources if (path / name).is_file()), None)
    if source is None:
        raise FileNotFoundError(
            f"{path}: has no tokenizer (tokenizer.json or {', '.join(sources)})"
        )
    try:
        from transformers import AutoTokenizer  # slow to import, and it brings torch along

        converted = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        backend = converted.backend_tokenizer
        special_tokens = dict(converted.special_tokens_map)
    except Exception as error:
        raise ValueError(
            f"there is no tokenizer.json, and transformers cannot convert {source} "
            f"({type(error).__name__}: {error}); save a tokenizer.json with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from error
    return backend, {
        name: str(special_tokens[name]) for name in _SPECIAL_NAMES if special_tokens.get(name)
    }


def _directory_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; a file of its own goes before tokenizer_config.json."""
    configured = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        templates = {entry["name"]: entry["template"] for entry in configured}
    elif isinstance(configured, dict):
        templates = dict(configured)
    in_json = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = in_json
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def _one_or_named(templates: dict[str, str]) -> str | dict[str, str] | None:
    if list(templates) == ["default"]:
        return templates["default"]
    return templates or None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object")
    return value


def _token_text(token: Any) -> str | None:
    """A token is written as its text or as an object with the text under "content"."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text is not valid Unicode: lone surrogate at character {error.start}"
        ) from error
