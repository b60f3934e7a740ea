"""Makes the helpers in this folder importable from every test. What holds for all folders."""

import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    # A shell's background jobs have it ignored, and their children, too; some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked ``cuda`` where there is no device."""
    if item.get_closest_marker("cuda") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny random model; see tiny_model.py."""
    from tiny_model import make_tiny_model

    directory: Path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return str(directory)
