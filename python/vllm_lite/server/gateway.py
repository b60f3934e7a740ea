"""The one layer in front of every route: request id, authentication, shutdown, last-resort errors.

Pure ASGI: it adds no task and buffers nothing, so streams pass through untouched.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from email.utils import formatdate

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_lite.server.errors import (
    ApiError,
    bad_request,
    from_exception,
    internal_error,
    is_messages_path,
    unavailable,
)
from vllm_lite.server.state import ServerState

logger = logging.getLogger("vllm_lite.server")

# Compared with the path as it is, so that no spelling of another route can pass as one of these.
_NO_KEY = frozenset({"/health"})
_WHILE_DRAINING = frozenset({"/health", "/metrics"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+=@/-]{1,128}", re.ASCII)  # protocol.RequestId, too


class Gateway:
    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        # Digests have one length, so that a comparison tells nothing about a key's.
        self._keys = [hashlib.sha256(key.encode()).digest() for key in state.options.api_keys]
        self._date = (0, b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id")
        valid = request_id is not None and _REQUEST_ID.fullmatch(request_id)
        shown = request_id if valid and request_id else secrets.token_hex(16)
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", shown.encode()),
                    (b"date", self._now()),
                ]
            await send(message)

        try:
            self._admit(scope["path"], headers)
            if request_id is not None and not valid:
                raise bad_request(
                    "X-Request-Id: must be 1 to 128 characters of A-Z a-z 0-9 . _ : + = @ / -",
                    "X-Request-Id",
                )
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            known = from_exception(error) if isinstance(error, ApiError) else None
            if known is None:
                logger.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise  # too late for an answer; the connection ends
            await send_error(known or internal_error(), scope["path"], send_with_headers)

    def _admit(self, path: str, headers: Headers) -> None:
        if (
            self._keys
            and path not in _NO_KEY
            and not self._has_key(headers.getlist("authorization"))
            and not (is_messages_path(path) and self._is_key(headers.getlist("x-api-key")))
        ):
            raise ApiError(
                401,
                "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if self._state.draining and path not in _WHILE_DRAINING:
            error = unavailable("the server is shutting down and takes no new requests")
            error.headers["connection"] = "close"
            raise error

    def _has_key(self, values: list[str]) -> bool:
        parts = [value.partition(" ") for value in values]
        known = self._is_key([key for _, _, key in parts])
        return known and parts[0][0].lower() == "bearer"

    def _is_key(self, values: list[str]) -> bool:
        if len(values) != 1:
            return False
        digest = hashlib.sha256(values[0].strip().encode("latin-1")).digest()
        # Every key is compared, so that the time tells nothing about which one matched.
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return any(matches)

    def _now(self) -> bytes:
        seconds = int(time.time())
        if self._date[0] != seconds:
            self._date = (seconds, formatdate(seconds, usegmt=True).encode())
        return self._date[1]


async def send_error(error: ApiError, path: str, send: Send) -> None:
    body = error.body(path)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
