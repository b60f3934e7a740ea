"""``/openapi.json``: FastAPI's routes with the schemas of the types that decode requests."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from vllm_lite.server.errors import ErrorResponse, MessagesErrorResponse
from vllm_lite.server.messages_protocol import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesEvent,
    MessagesRequest,
    MessagesResponse,
)
from vllm_lite.server.pooling_protocol import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from vllm_lite.server.protocol import (
    NEUTRAL,
    ChatChunk,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    HealthResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    SamplingFields,
    VersionResponse,
    unsupported_fields,
)
from vllm_lite.server.responses_protocol import ResponsesEvent, ResponsesRequest, ResponsesResponse
from vllm_lite.server.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)

_TYPES: tuple[type[msgspec.Struct], ...] = (
    ChatChunk,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    CountTokensRequest,
    CountTokensResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    ErrorResponse,
    HealthResponse,
    LoadResponse,
    MessagesErrorResponse,
    MessagesEvent,
    MessagesRequest,
    MessagesResponse,
    ModelCard,
    ModelList,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    ResponsesEvent,
    ResponsesRequest,
    ResponsesResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
    VersionResponse,
)


def _tell_neutral_values(type_: type[SamplingFields], properties: dict[str, Any]) -> None:
    """Of what is not supported the values that are taken."""
    for name in unsupported_fields(type_):
        properties[name] |= {"enum": [None, *NEUTRAL.get(name, ())]}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _errors(name: str) -> dict[str, Any]:
    return {
        "4XX": _json(_ref(name), "The request was refused"),
        "5XX": _json(_ref(name), "The server or its engine failed"),
    }


def answers(name: str, error: str = "ErrorResponse") -> dict[str, Any]:
    return {"responses": {"200": _json(_ref(name), "OK"), **_errors(error)}}


def text(description: str) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    found = {"description": description, "content": content}
    return {"responses": {"200": found, **_errors("ErrorResponse")}}


def takes(
    request: str | tuple[str, ...], response: str, error: str = "ErrorResponse"
) -> dict[str, Any]:
    """A route that takes one of the types in ``request``."""
    schema: dict[str, Any] = (
        _ref(request) if isinstance(request, str) else {"anyOf": [_ref(name) for name in request]}
    )
    body = _json(schema, "") | {"required": True}
    return answers(response, error) | {"requestBody": body}


def generation(
    request: str,
    response: str,
    event: str,
    *,
    last: str = "[DONE] or an ErrorResponse",
    error: str = "ErrorResponse",
) -> dict[str, Any]:
    """A route that gives ``response``, or server-sent events of type ``event``.

    ``last``: what may end the stream in place of an event.
    """
    out = takes(request, response, error)
    answer = out["responses"]["200"]
    answer["description"] = f"The answer; with stream true {event} after {event}, the last {last}"
    # Of one event, as OpenAPI 3.2 describes streams of them; [DONE] is no JSON.
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(event)}
    answer["content"]["text/event-stream"] = {
        "schema": {
            "type": "object",
            "required": ["data"],
            "properties": {"event": {"type": "string"}, "data": data},
        }
    }
    return out


def install(app: FastAPI, version: str) -> None:
    """The document is made when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title="vllm_lite", version=version, routes=app.routes)
            _, components = msgspec.json.schema_components(
                _TYPES, ref_template="#/components/schemas/{name}"
            )
            for type_ in _TYPES:
                if issubclass(type_, SamplingFields):
                    _tell_neutral_values(type_, components[type_.__name__]["properties"])
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
