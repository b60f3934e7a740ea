"""What holds for every route: keys, request ids, bodies, errors, shutdown."""

import logging

import pytest
from starlette.routing import Route

from server.client import Client, refused
from server.fakes import FakeEngine
from vllm_lite.server.options import ServerOptions

KEYS = ("sk-first", "sk-second")


@pytest.fixture
def guarded(engine: FakeEngine) -> Client:
    return Client(engine, ServerOptions(api_keys=KEYS))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.case("SEC-01")
def test_every_route_but_health_needs_a_key(guarded: Client) -> None:
    routes = [
        (method, route.path.replace("{model:path}", "fake"))
        for route in guarded.app.routes
        if isinstance(route, Route)
        for method in ("GET", "HEAD", "OPTIONS", "POST", *(route.methods or ()))
    ]
    assert len(guarded.app.routes) == len([r for r in guarded.app.routes if isinstance(r, Route)])
    assert len(routes) >= 8
    for method, path in routes:
        if path == "/health":
            assert guarded.request(method, path).status_code in (200, 405)
            continue
        for headers in ({}, bearer("wrong"), bearer(""), {"Authorization": KEYS[0]}):
            response = guarded.request(method, path, headers=headers)
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
        for key in KEYS:
            assert guarded.request(method, path, headers=bearer(key)).status_code != 401
    assert guarded.engine.calls == []


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "//v1/models",
        "/V1/models",
        "/v1/../v1/models",
        "/health/../v1/models",
        "/health/",
        "//health",
        "/health%2f..%2fv1/models",
        "/v1/models?api_key=sk-first",
        "/docs",
        "/redoc",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE"])
@pytest.mark.case("SEC-01")
def test_no_spelling_goes_round_the_key(guarded: Client, path: str, method: str) -> None:
    assert guarded.request(method, path).status_code == 401


def test_key_rules(guarded: Client) -> None:
    assert (
        guarded.get("/v1/models", headers={"Authorization": "bearer sk-first"}).status_code == 200
    )
    twice = [("Authorization", "Bearer sk-first"), ("Authorization", "Bearer wrong")]
    assert refused(guarded.get("/v1/models", headers=twice), 401)["code"] == "invalid_api_key"
    refused(guarded.get("/v1/models", headers={"Authorization": b"Bearer \xff\xfe"}), 401)
    refused(guarded.get("/v1/models", headers={"Authorization": "Basic sk-first"}), 401)


def test_empty_key_is_a_configuration_error() -> None:
    with pytest.raises(ValueError, match="api_keys"):
        ServerOptions(api_keys=("",))


def test_no_cors_unless_asked(engine: FakeEngine) -> None:
    origin = {"Origin": "https://a.example"}
    preflight = origin | {"Access-Control-Request-Method": "POST"}
    client = Client(engine)
    assert "access-control-allow-origin" not in client.get("/health", headers=origin).headers
    assert client.request("OPTIONS", "/v1/completions", headers=preflight).status_code == 405
    client = Client(engine, ServerOptions(cors_origins=("https://a.example",)))
    response = client.request("OPTIONS", "/v1/completions", headers=preflight)
    assert response.headers["access-control-allow-origin"] == "https://a.example"


def test_request_id_is_echoed_or_made(client: Client) -> None:
    response = client.get("/health", headers={"X-Request-Id": "abc-1:2/3"})
    assert response.headers["x-request-id"] == "abc-1:2/3"
    made = {client.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    # The engine's ids are the server's own: a client may repeat its id.
    for _ in range(2):
        response = client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "same"}
        )
        assert response.status_code == 200
        assert "same" not in response.text


@pytest.mark.case("API-08")
@pytest.mark.parametrize("value", ["x" * 129, "x" * 1_000_000, "a b", 'a"b', "a\x07b", "", "é"])
def test_unsafe_request_ids_are_refused(client: Client, value: str) -> None:
    response = client.get("/health", headers={"X-Request-Id": value.encode("latin-1")})
    refused(response, 400, "X-Request-Id", "128")
    assert len(response.headers["x-request-id"]) == 32


def test_unknown_routes_and_methods(client: Client) -> None:
    assert refused(client.get("/v1/nothing"), 404)["code"] == "not_found"
    response = client.get("/v1/completions")
    assert refused(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert client.post("/health").headers.get_list("allow") == ["GET, HEAD"]
    for path in ("/health", "/v1/models", "/metrics", "/load", "/version"):
        assert client.request("HEAD", path).status_code == 200
    refused(client.request("OPTIONS", "/v1/completions"), 405)
    refused(client.get("/v1/models/"), 404)
    long = refused(client.get("/" + "x" * 5000), 404)
    assert len(long["message"]) < 300


def test_models(client: Client) -> None:
    body = client.get("/v1/models").json()
    assert [card["id"] for card in body["data"]] == ["fake", "alias"]
    assert body["data"][0]["max_model_len"] == 256
    assert client.get("/v1/models/alias").json()["id"] == "alias"
    client.engine.config.served_model_names = ["org/name"]
    assert client.get("/v1/models/org/name").json()["id"] == "org/name"
    assert refused(client.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_load_counts_what_is_being_answered(client: Client) -> None:
    seen = []
    client.engine.health = lambda: None  # type: ignore[method-assign]
    generate = client.engine.generate

    async def watched(*args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(len(client.state.active))
        async for output in generate(*args, **kwargs):
            yield output

    client.engine.generate = watched  # type: ignore[method-assign]
    assert client.get("/load").json() == {"server_load": 0}
    client.complete()
    assert seen == [1]
    assert client.get("/load").json() == {"server_load": 0}


def test_version(client: Client) -> None:
    assert set(client.get("/version").json()) == {"version"}


@pytest.mark.case("HLT-03")
def test_health_tells_the_engines_reason(client: Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    client.engine.reason = "steps stall: 12 s without a result"
    refused(client.get("/health"), 503, None, "12 s")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "unknown": NaN}',
        b'{"prompt": "a"} {}',
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "unknown": ' + b'{"a":' * 100_000,
        b'{"prompt": "a", "echo": ' + b"[" * 100_000,
        b'{"prompt": [' + b"9" * 5000 + b"]}",
    ],
)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/detokenize",
    ],
)
@pytest.mark.case("SMP-01")
def test_malformed_bodies_are_400(client: Client, path: str, body: bytes) -> None:
    response = client.post(path, content=body)
    assert response.status_code == 400 and "error" in response.json(), response.text
    assert client.engine.calls == []


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/json; charset=utf-8"])
def test_content_type_does_not_matter(client: Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.case("HLT-01")
def test_bodies_are_bounded(engine: FakeEngine) -> None:
    client = Client(engine, ServerOptions(max_body_bytes=1000))
    body = b'{"prompt": "' + b"a" * 100 + b'"'
    exact = body + b" " * (999 - len(body)) + b"}"
    assert client.post("/v1/completions", content=exact).status_code == 200
    refused(client.post("/v1/completions", content=b" " + exact), 413, None, "1000")

    async def chunks():  # type: ignore[no-untyped-def]  # no content-length
        for _ in range(11):
            yield b" " * 100

    refused(client.post("/v1/completions", content=chunks()), 413, None, "1000")
    assert client.state.pending_body_bytes == 0


def test_bodies_together_are_bounded(engine: FakeEngine) -> None:
    client = Client(engine, ServerOptions(max_body_bytes=1000, max_pending_body_bytes=1000))
    client.state.pending_body_bytes = 990
    response = client.complete()
    assert refused(response, 429)["code"] == "rate_limit_exceeded"
    assert response.headers["retry-after"] == "1"
    assert client.state.pending_body_bytes == 990


def test_a_bug_is_a_500_without_details(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("private detail")

    monkeypatch.setattr(client.engine, "health", broken)
    with caplog.at_level(logging.ERROR):
        error = refused(client.get("/health"), 500)
    assert "private" not in error["message"]
    assert "private detail" in caplog.text


def test_draining_refuses_new_requests(client: Client) -> None:
    client.state.draining = True
    response = client.complete()
    refused(response, 503, None, "shutting down")
    assert response.headers["connection"] == "close"
    refused(client.get("/health"), 503, None, "shutting down")
    assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_still_being_parsed_when_the_grace_time_ends_gets_503(
    client: Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        client.state.draining = client.state.stopped = True
        return [1]

    monkeypatch.setattr(client.engine.tokenizer, "encode", encode)
    refused(client.complete(stream=stream), 503, None, "shutting down")
    assert client.engine.calls == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shutdown_grace", float("nan")),
        ("shutdown_grace", float("inf")),
        ("keep_alive", float("nan")),
        ("keep_alive", -1),
        ("backlog", 99_999_999_999),
        ("threads", 0),
        ("max_body_bytes", 2**40),
        ("max_choices", 2**31),
    ],
)
def test_an_option_out_of_bounds_names_field_value_and_limits(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is {value}; it must be from \d+ to \d+$"):
        ServerOptions(**{name: value})
