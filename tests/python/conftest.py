"""Makes this folder importable from every test: helpers are imported as ``folder.module``.

Each folder is a package (an empty ``__init__.py``), so that files of one name in two folders, such
as conftest.py, are two modules.
"""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny random model; see tiny_model.py."""
    from tiny_model import make_tiny_model

    directory: Path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return str(directory)
