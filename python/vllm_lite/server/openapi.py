"""``/openapi.json``: FastAPI's routes with the schemas of the types that decode requests."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from vllm_lite.server.errors import ErrorResponse
from vllm_lite.server.pooling_protocol import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from vllm_lite.server.protocol import (
    ChatChunk,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
)

_TYPES = (
    ChatChunk,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)


def _json(name: str, description: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_ERRORS = {
    "4XX": _json("ErrorResponse", "The request was refused"),
    "5XX": _json("ErrorResponse", "The server or its engine failed"),
}


def answers(name: str, request: str | None = None) -> dict[str, Any]:
    """A route that gives ``name``, and takes ``request`` if it takes a body."""
    out: dict[str, Any] = {"responses": {"200": _json(name, "OK"), **_ERRORS}}
    if request is not None:
        out["requestBody"] = _json(request, "") | {"required": True}
    return out


def text(description: str) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {"responses": {"200": {"description": description, "content": content}, **_ERRORS}}


def generation(request: str, response: str, chunk: str) -> dict[str, Any]:
    """A route that takes ``request`` and gives ``response``, or server-sent events of ``chunk``."""
    out = answers(response, request)
    out["responses"]["200"]["description"] = (
        f"The answer; with stream true events of {chunk}, the last [DONE] or an ErrorResponse"
    )
    events = {"schema": {"$ref": f"#/components/schemas/{chunk}"}}
    out["responses"]["200"]["content"]["text/event-stream"] = events
    return out


def install(app: FastAPI, version: str) -> None:
    """The document is made when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title="vllm_lite", version=version, routes=app.routes)
            _, components = msgspec.json.schema_components(
                _TYPES, ref_template="#/components/schemas/{name}"
            )
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
