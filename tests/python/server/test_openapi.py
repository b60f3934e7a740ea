"""/openapi.json tells the truth, and the package stays light."""

import subprocess
import sys
from typing import Any

from server.client import Client
from waiting import PATIENCE


def resolve(document: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        found: Any = document
        for key in node["$ref"].removeprefix("#/").split("/"):
            found = found[key]
        node = found
    return node


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in references(value)]
    if isinstance(node, list):
        return [ref for value in node for ref in references(value)]
    return []


def test_document_has_the_routes_and_the_real_schemas(client: Client) -> None:
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/detokenize",
        "/health",
        "/load",
        "/metrics",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v2/rerank",
        "/version",
    }
    for ref in references(document):
        resolve(document, {"$ref": ref})
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        operation = document["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        properties = resolve(document, body)["properties"]
        temperature = next(s for s in properties["temperature"]["anyOf"] if s["type"] == "number")
        assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
        answers = operation["responses"]["200"]["content"]
        assert set(answers) == {"application/json", "text/event-stream"}
        assert "4XX" in operation["responses"]


def test_importing_the_server_brings_no_torch() -> None:
    script = (
        "import sys, vllm_lite.server.run\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
