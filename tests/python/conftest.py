"""Makes the helpers in this folder importable from every test. Fixtures that folders share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny random model; see tiny_model.py."""
    from tiny_model import make_tiny_model

    directory: Path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return str(directory)
