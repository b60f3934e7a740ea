"""Reading a request's body within bounds."""

from typing import TypeVar

import msgspec
from starlette.requests import Request

from vllm_lite import chat_template
from vllm_lite.server.errors import ApiError, bad_request, from_decode_error
from vllm_lite.server.state import ServerState

T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises ``ApiError`` naming the field that has a wrong type or range."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise from_decode_error(error, body) from error


def check_nesting(value: object, param: str) -> None:
    """Refuses objects and lists that lie in each other too deeply."""
    try:
        chat_template.check_nesting(value, param)
    except ValueError as error:
        raise bad_request(str(error), param) from error


class Body:
    """``async with Body(request, state) as chunks``: the whole body.

    Its bytes count as pending until the block ends. Raises ``ApiError`` 413 as soon as the body is
    known to be over its bound (by its announced length, or while it comes in), 429 when all pending
    bodies together are over theirs.
    """

    def __init__(self, request: Request, state: ServerState) -> None:
        self._request = request
        self._state = state
        self._held = 0

    async def __aenter__(self) -> list[bytes]:
        limit = self._state.options.max_body_bytes
        announced = self._request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limit:
            raise _too_large(limit)
        chunks = []
        try:
            async for chunk in self._request.stream():
                self._hold(len(chunk))
                if self._held > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
        except BaseException:
            self._release()
            raise
        return chunks

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _hold(self, size: int) -> None:
        self._held += size
        self._state.pending_body_bytes += size
        if self._state.pending_body_bytes > self._state.options.max_pending_body_bytes:
            raise ApiError(
                429,
                "too many large requests are being read; try again later",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )

    def _release(self) -> None:
        self._state.pending_body_bytes -= self._held
        self._held = 0


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than {limit} bytes, this server's limit; send it in parts",
        code="request_too_large",
    )
