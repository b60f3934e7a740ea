"""Every error answer has OpenAI's shape: ``{"error": {message, type, param, code}}``.

On Anthropic's routes it has theirs: ``{"type": "error", "error": {type, message}}``.
"""

import math
import re
import reprlib
from collections.abc import Mapping

import msgspec

from vllm_lite.errors import EngineDeadError, EngineError, ImpossibleError, QueueFullError
from vllm_lite.sampling_params import SamplingParams


class ErrorInfo(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, kw_only=True):
    error: ErrorInfo


class MessagesErrorInfo(msgspec.Struct, kw_only=True):
    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct, kw_only=True):
    type: str = "error"
    error: MessagesErrorInfo


# Anthropic's names; other statuses below 500 are invalid_request_error, above api_error.
_MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_messages_path(path: str) -> bool:
    """Anthropic's routes."""
    return path in ("/v1/messages", "/v1/messages/count_tokens")


class ApiError(Exception):
    """An error with its HTTP status; ``param`` is the request field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.info = ErrorInfo(message=message, type=type, param=param, code=code)
        self.headers = dict(headers or {})

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """The same about a request whose fields have other names: ``names`` by expressions for the
        beginning of a field's path here.
        """
        message, param = self.info.message, self.info.param or ""
        for here, there in names.items():
            if re.match(here, param):
                return ApiError(
                    self.status,
                    re.sub(rf"\A{here}", there, message),
                    type=self.info.type,
                    param=re.sub(rf"\A{here}", there, param),
                    code=self.info.code,
                    headers=self.headers,
                )
        return self

    def body(self, path: str = "") -> bytes:
        """In the shape that the route has."""
        if is_messages_path(path):
            return msgspec.json.encode(self.for_messages())
        return msgspec.json.encode(ErrorResponse(error=self.info))

    def for_messages(self) -> MessagesErrorResponse:
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _MESSAGES_TYPES.get(self.status, kind)
        return MessagesErrorResponse(error=MessagesErrorInfo(type=kind, message=self.info.message))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def show(value: object) -> str:
    """A value for an error message, never long."""
    return _SHOW.repr(value)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, type="service_unavailable_error", code="service_unavailable")


def from_exception(error: Exception, *, started: bool = False) -> ApiError | None:
    """The answer to an engine's exception; None for one that no request should cause (a bug: 500).

    ``started``: the engine has already given output, so a ``ValueError`` no longer means bad input.
    """
    match error:
        case ApiError():
            return error
        case QueueFullError():
            seconds = max(1, math.ceil(error.retry_after))
            return ApiError(
                429,
                str(error),
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"retry-after": str(seconds)},
            )
        case ImpossibleError():
            return bad_request(str(error))
        case EngineDeadError():
            return unavailable(str(error) or "the engine is not running")
        case EngineError():
            message = str(error) or "the engine failed on this request"
            return ApiError(500, message, type="server_error", code="engine_error")
        case ValueError() if not started:
            return bad_request(str(error), field_of(error))
    return None


def field_of(error: ValueError) -> str | None:
    """The request field at fault: messages about ``SamplingParams`` begin with its name."""
    first = re.split(r"[ \[:]", str(error), maxsplit=1)[0]
    return first if first in SamplingParams.__struct_fields__ else None


def internal_error() -> ApiError:
    return ApiError(
        500,
        "internal error; the server's log has the details",
        type="server_error",
        code="internal",
    )


def from_decode_error(error: Exception, body: bytes) -> ApiError:
    """Names the field that a request body broke, with the value found there."""
    if isinstance(error, RecursionError):
        return bad_request("the request body is nested too deeply", code="invalid_json")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"the request body is not valid JSON: {text}", code="invalid_json")
    what, _, where = text.partition(" - at ")
    path = where.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing and not path:
        return bad_request(f"{missing[1]}: missing; it is required", missing[1])
    if not path:
        return bad_request(f"the request body must be a JSON object: {what}")
    found = value_at(body, path)
    got = f"; got {show(found)}" if found is not NOWHERE and "got" not in what else ""
    if found is not NOWHERE and "got" in what:
        got = f" {show(found)}"
    return bad_request(f"{path}: {what}{got}", param=re.split(r"\.\.\.|\[\.\.\.", path)[0])


_SHOW = reprlib.Repr()
_SHOW.maxstring = _SHOW.maxother = 80
NOWHERE = object()  # what ``value_at`` gives where there is nothing


def value_at(body: bytes, path: str) -> object:
    """The value at ``a.b[0].c``; ``NOWHERE`` where the path does not say which (``[...]``)."""
    try:
        value = msgspec.json.decode(body)
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
            value = value[name] if name else value[int(index)]
    except (ValueError, LookupError, TypeError, RecursionError, msgspec.DecodeError):
        return NOWHERE
    return value
