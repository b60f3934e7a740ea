"""What the tests of this folder share: writers of small tokenizers, as directories and as GGUF."""

import json
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFWriter
from tokenizers import Tokenizer, processors

from vllm_lite.model_files import ModelFiles

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what we'll do, they've said in 2026.",
    "Größe, naïve café, ďábel; 東京は日本の首都です。 Привет, мир! 🙂🙂 family",
    "def f(x):\n    return x + 1\n\n\nfor i in range(1000):\n\tprint(f(i), 12345)",
    "aaa aaaa aa a    spaces   and\ttabs\r\n  new lines \n\n <not a token> [INST] 3.14159",
] * 4

BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True)
class Fixture:
    directory: Path
    gguf: Path
    reference: Tokenizer  # what the directory was saved from
    vocab: list[str]
    scores: list[float]
    types: list[int]


def write_gguf(
    path: Path,
    model: str,
    tokens: list[str],
    types: list[int],
    pre: str = "gpt-2",
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    **special: int | bool,
) -> ModelFiles:
    """``special``: bos, eos, eot, pad, unk (ids), add_bos, add_eos, add_space_prefix (flags)."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if model == "gpt2":
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges or ["Ġ t"])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)
    adders = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id,
        "pad": writer.add_pad_token_id,
        "unk": writer.add_unk_token_id,
        "add_bos": writer.add_add_bos_token,
        "add_eos": writer.add_add_eos_token,
        "add_space_prefix": writer.add_add_space_prefix,
    }
    for name, value in special.items():
        adders[name](value)
    writer.add_chat_template(BOS_TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelFiles(path)


def save_directory(path: Path, tokenizer: Tokenizer, config: dict[str, object]) -> ModelFiles:
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return ModelFiles(path)


def bos_processor(bos: str, bos_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
