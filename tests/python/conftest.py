"""Makes the helpers in this folder importable from every test. What holds for all folders."""

import os
import signal
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.cores import num_available_cores

# torch's. Tiny models gain nothing from more, and lose much where other programs use the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_WORKER_MEMORY = 3 << 30  # bytes; the largest that one has used are 2 GiB


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: as many as there are cores, and memory for. Some tests take a minute, so
    that many more gain nothing.
    """
    import psutil

    room = psutil.virtual_memory().available // _WORKER_MEMORY
    return max(1, min(num_available_cores(), room, 16))


def pytest_configure() -> None:
    # A shell's background jobs have it ignored, and their children, too; some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Neither may a clock fail a property: a machine may be busy while examples are drawn.
    with suppress(ImportError):
        from hypothesis import HealthCheck, settings

        settings.register_profile("no clock", suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("no clock")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked ``cuda`` where there is no device."""
    if item.get_closest_marker("cuda") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escapes lone surrogates, which some tests log: pytest-xdist's workers cannot send them."""
    return _escaped((yield))


def _escaped(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode(errors="backslashreplace").decode()
    if isinstance(data, dict):
        return {_escaped(key): _escaped(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(_escaped, data))
    return data


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny random model; see tiny_model.py."""
    from tiny_model import make_tiny_model

    directory: Path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return str(directory)
