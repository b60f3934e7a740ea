"""A server with SmolLM2 for all clients, one with a tiny random model, and no network but these."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.common import KEY, MODEL
from processes.server_process import ServerProcess


@pytest.fixture(scope="session", autouse=True)
def loopback_only() -> Iterator[None]:
    """Some clients fetch price lists, models or data when they are imported or used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("LANGSMITH_TRACING", "false")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_EVALUATE_OFFLINE", "1")
        yield


def _serve(directory: Path, *arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess(directory, *arguments)
    try:
        yield server.wait_ready()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log()
        assert "Traceback" not in server.log()
    finally:
        server.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Of SmolLM2, in float32: greedy answers do not depend on what runs beside them."""
    options = ("--dtype", "float32", "--max-model-len", "2048", "--api-key", KEY)
    yield from _serve(tmp_path_factory.mktemp("smollm2"), MODEL, *options)


@pytest.fixture(scope="session")
def tiny_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str
) -> Iterator[ServerProcess]:
    """Of a tiny random model in float32, with a queue that is soon full."""
    options = ("--served-model-name", "tiny", "--max-num-seqs", "2", "--max-num-waiting", "8")
    yield from _serve(tmp_path_factory.mktemp("tiny"), tiny_model, *options)
