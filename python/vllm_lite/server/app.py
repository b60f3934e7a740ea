"""The routes."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from vllm_lite.server import (
    chat,
    completions,
    messages,
    openapi,
    pooling,
    responses,
    tokenize,
)
from vllm_lite.server.body import Body
from vllm_lite.server.engine import EngineLike
from vllm_lite.server.errors import ApiError, show, unavailable
from vllm_lite.server.gateway import Gateway
from vllm_lite.server.generation import GenerationResponse, Job, Renderer
from vllm_lite.server.metrics import CONTENT_TYPE, MetricsPage
from vllm_lite.server.options import ServerOptions
from vllm_lite.server.protocol import (
    HealthResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    VersionResponse,
)
from vllm_lite.server.state import ServerState
from vllm_lite.version import __version__

Prepare = Callable[[ServerState, bytes], tuple[Job, Renderer]]
Endpoint = Callable[..., Awaitable[Response]]
Work = Callable[[ServerState, bytes], msgspec.Struct]


def create_app(engine: EngineLike, options: ServerOptions | None = None) -> FastAPI:
    """The ASGI application; its ``ServerState`` is ``app.state.server``."""
    state = ServerState(engine, options or ServerOptions())
    # The documentation pages load scripts from other hosts; the document itself is served.
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = state
    openapi.install(app, __version__)
    app.add_middleware(Gateway, state=state)
    if state.options.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_routes(app, state)
    return app


def _add_routes(app: FastAPI, state: ServerState) -> None:
    engine = state.engine
    config = engine.config

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name, created=state.created, root=config.model, max_model_len=config.max_model_len
        )

    def get(path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            app.head(path, include_in_schema=False)(endpoint)
            return app.get(path, **options)(endpoint)

        return add

    @app.post(
        "/v1/completions",
        openapi_extra=openapi.generation(
            "CompletionRequest", "CompletionResponse", "CompletionResponse"
        ),
    )
    async def create_completion(request: Request) -> Response:
        return await _generate(request, state, completions.prepare)

    @app.post(
        "/v1/chat/completions",
        openapi_extra=openapi.generation("ChatRequest", "ChatResponse", "ChatChunk"),
    )
    async def create_chat_completion(request: Request) -> Response:
        return await _generate(request, state, chat.prepare)

    @app.post(
        "/v1/responses",
        openapi_extra=openapi.generation(
            "ResponsesRequest", "ResponsesResponse", "ResponsesEvent", last="an event error"
        ),
    )
    async def create_response(request: Request) -> Response:
        return await _generate(request, state, responses.prepare)

    @app.post(
        "/v1/messages",
        openapi_extra=openapi.generation(
            "MessagesRequest",
            "MessagesResponse",
            "MessagesEvent",
            last="a MessagesErrorResponse",
            error="MessagesErrorResponse",
        ),
    )
    async def create_message(request: Request) -> Response:
        return await _generate(request, state, messages.prepare)

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=openapi.takes(
            "CountTokensRequest", "CountTokensResponse", error="MessagesErrorResponse"
        ),
    )
    async def count_tokens(request: Request) -> Response:
        return await _answer(request, state, messages.count_tokens)

    @app.post(
        "/tokenize",
        openapi_extra=openapi.takes(
            ("TokenizeTextRequest", "TokenizeChatRequest"), "TokenizeResponse"
        ),
    )
    async def tokenize_text(request: Request) -> Response:
        return await _answer(request, state, tokenize.tokenize)

    @app.post("/detokenize", openapi_extra=openapi.takes("DetokenizeRequest", "DetokenizeResponse"))
    async def detokenize_ids(request: Request) -> Response:
        return await _answer(request, state, tokenize.detokenize)

    @get("/load", openapi_extra=openapi.answers("LoadResponse"))
    async def show_load() -> Response:
        """Requests that are being answered."""
        return _json(LoadResponse(server_load=len(state.active)))

    @app.post(
        "/v1/embeddings", openapi_extra=openapi.takes("EmbeddingRequest", "EmbeddingResponse")
    )
    async def create_embeddings(request: Request) -> Response:
        return await _generate(request, state, pooling.prepare_embeddings)

    async def score(request: Request) -> Response:
        """How likely each query is after its document."""
        return await _generate(request, state, pooling.prepare_score)

    async def rerank(request: Request) -> Response:
        """The documents, those first after which the query is likeliest."""
        return await _generate(request, state, pooling.prepare_rerank)

    for path in ("/score", "/v1/score"):
        app.post(path, openapi_extra=openapi.takes("ScoreRequest", "ScoreResponse"))(score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path, openapi_extra=openapi.takes("RerankRequest", "RerankResponse"))(rerank)

    @get("/v1/models", openapi_extra=openapi.answers("ModelList"))
    async def list_models() -> Response:
        return _json(ModelList(data=[card(name) for name in config.served_model_names]))

    @get("/v1/models/{model:path}", openapi_extra=openapi.answers("ModelCard"))
    async def retrieve_model(model: str) -> Response:
        if model not in config.served_model_names:
            raise ApiError(
                404,
                f"model: {show(model)} is not served here",
                param="model",
                code="model_not_found",
            )
        return _json(card(model))

    @get("/health", openapi_extra=openapi.answers("HealthResponse"))
    async def health() -> Response:
        """200 while the engine can serve, 503 with the reason otherwise."""
        reason = "the server is shutting down" if state.draining else engine.health()
        if reason is not None:
            raise unavailable(reason)
        return _json(HealthResponse())

    @get("/version", openapi_extra=openapi.answers("VersionResponse"))
    async def show_version() -> Response:
        return _json(VersionResponse(version=__version__))

    metrics_page = MetricsPage(state.metrics)

    @get("/metrics", openapi_extra=openapi.text("Prometheus text format"))
    async def metrics() -> Response:
        return Response(metrics_page(), media_type=CONTENT_TYPE)


async def _answer(request: Request, state: ServerState, work: Work) -> Response:
    """For what needs no engine. ``work`` and the writing of its answer run in a thread."""
    try:
        async with Body(request, state) as chunks:
            body = await state.offload(lambda: msgspec.json.encode(work(state, b"".join(chunks))))
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    return Response(body, media_type="application/json")


async def _generate(request: Request, state: ServerState, prepare: Prepare) -> Response:
    """Parsing and tokenising run in a thread: a body of megabytes takes seconds."""
    try:
        async with Body(request, state) as chunks:
            job, renderer = await state.offload(lambda: prepare(state, b"".join(chunks)))
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    return GenerationResponse(state, job, renderer)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(request.url.path), error.status, error.headers, "application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {show(request.url.path)}"
    message, code = f"{where}: {error.detail}", None
    if error.status_code == 404:
        message, code = f"{where}: there is no such route", "not_found"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message, code = f"{where}: this route does not take this method", "method_not_allowed"
        headers["Allow"] = ", ".join(_methods(request))
    api_error = ApiError(error.status_code, message, code=code, headers=headers)
    return await _on_api_error(request, api_error)


def _methods(request: Request) -> list[str]:
    """What the routes at the request's path take: GET and HEAD are two of them."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods
    return sorted(methods)
