"""OpenAI's Node client: each check of node/openai.mjs in a process of its own."""

import shutil
import subprocess
from pathlib import Path

import pytest

from clients.common import KEY, MODEL
from processes.server_process import ServerProcess

DIRECTORY = Path(__file__).parent / "node"
NODE = shutil.which("node") or ""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NODE, reason="node is not installed"),
    pytest.mark.skipif(
        not (DIRECTORY / "node_modules" / "openai").is_dir(),
        reason="OpenAI's Node client is not installed; run `make test-clients`",
    ),
]


@pytest.mark.parametrize(
    "check", ["chat", "tools", "schema", "responses", "embeddings", "errors", "abort"]
)
def test_openai_node(server: ServerProcess, check: str) -> None:
    command = [NODE, str(DIRECTORY / "openai.mjs"), check, f"{server.url}/v1", KEY, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    if check == "abort":
        with server.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
            server.wait_idle(client)
