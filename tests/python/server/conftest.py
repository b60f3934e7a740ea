"""Fixtures: the fake engine, a client of it in process, and a server of it on a loopback port."""

from collections.abc import Iterator

import pytest

from server.client import Client, LiveServer
from server.fakes import FakeEngine
from vllm_lite.server.options import ServerOptions


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Client:
    return Client(engine)


@pytest.fixture
def live(engine: FakeEngine) -> Iterator[LiveServer]:
    server = LiveServer(engine, ServerOptions(api_keys=("secret", "other")))
    yield server
    server.close()
