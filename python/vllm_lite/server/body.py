"""Reading a request's body within bounds."""

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from vllm_lite import chat_template
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.server.errors import NOWHERE, ApiError, bad_request, from_decode_error, value_at
from vllm_lite.server.protocol import ChatRequest
from vllm_lite.server.state import ServerState

T = TypeVar("T")

# Requests have another type of that name.
_NOT_SAMPLING = {"structured_outputs"}


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises ``ApiError`` naming the field that has a wrong type or range: in the words of
    ``SamplingParams`` if the field is one of its own.
    """
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        refused = from_decode_error(error, body)
        raise _in_words_of_sampling_params(refused, decoder.type, body) from error


def _in_words_of_sampling_params(refused: ApiError, request: object, body: bytes) -> ApiError:
    param = refused.info.param or ""
    field = re.split(r"[.\[]", param, maxsplit=1)[0]
    if field not in SamplingParams.__struct_fields__ or field in _NOT_SAMPLING:
        return refused
    if field == "logprobs" and request is ChatRequest:  # a bool; the number is top_logprobs
        return refused
    value = value_at(body, field)
    if value is NOWHERE:
        return refused
    fields: dict[str, Any] = {"max_tokens": None, field: value}
    try:
        SamplingParams(**fields)
    except ValueError as error:
        return bad_request(str(error), param)
    return refused


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
