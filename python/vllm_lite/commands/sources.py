"""Where ``chat`` and ``complete`` get their text from: a server, or a model in this process.

Both give an answer piece by piece. Leaving the iterator ends the request.
"""

import http.client
import json
import socket
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_lite.config import EngineConfig

Message = dict[str, Any]


class AnswerError(Exception):
    """The server or the engine has refused or ended the request; the message says why."""


@dataclass(frozen=True)
class Piece:
    text: str
    num_tokens: int | None  # of the answer so far, if that is known


class Source(Protocol):
    def answer(self, prompt: str | list[Message], options: dict[str, Any]) -> Iterator[Piece]:
        """Goes on with a text, or answers a conversation. ``options``: sampling parameters under
        OpenAI's names, without those that are None.
        """
        ...

    def close(self) -> None: ...


class Server:
    """OpenAI's API at ``url``, over http or https. ``model`` None: the server's first."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: must begin with http:// or https://, got {url!r}")
        self._parts = parts
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self._first_model()

    def answer(self, prompt: str | list[Message], options: dict[str, Any]) -> Iterator[Piece]:
        body = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **options,
        }
        if isinstance(prompt, str):
            path, body["prompt"] = "/v1/completions", prompt
        else:
            path, body["messages"] = "/v1/chat/completions", prompt
        try:
            data = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise AnswerError("the text has bytes that are not UTF-8") from None
        except ValueError:
            raise AnswerError("temperature and top_p must be finite numbers") from None
        connection, response = self._request("POST", path, data)
        try:
            for line in response:
                event = line.strip().removeprefix(b"data:").strip()
                if event == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield _piece(json.loads(event))
            raise AnswerError("the server ended the stream before its end")
        except (OSError, http.client.HTTPException) as error:
            raise AnswerError(f"the connection broke: {error}") from None
        finally:
            _cut(connection)

    def close(self) -> None:
        pass

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/v1/models")
        try:
            models = json.loads(response.read())["data"]
        finally:
            connection.close()
        if not models:
            raise AnswerError("the server has no model")
        return str(models[0]["id"])

    def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A 200; anything else is an ``AnswerError`` with the server's message."""
        secure = self._parts.scheme == "https"
        make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = make(self._parts.hostname or "", self._parts.port)
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise AnswerError(f"no answer from {self._parts.geturl()}: {error}") from None
        if response.status != 200:
            data = response.read()
            connection.close()
            raise AnswerError(f"{response.status}: {_message_of(data)}")
        return connection, response


def _cut(connection: http.client.HTTPConnection) -> None:
    """Ends the connection at once, so that the server ends the request if it still runs."""
    if connection.sock is not None:
        with suppress(OSError):  # the server has closed it
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _piece(event: Any) -> Piece:
    if "error" in event:
        raise AnswerError(event["error"]["message"])
    text = ""
    for choice in event["choices"]:
        text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    usage = event.get("usage")
    return Piece(text, usage["completion_tokens"] if usage else None)


def _message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:300] or "no message"


class Local:
    """A model that is loaded into this process."""

    def __init__(self, config: EngineConfig) -> None:
        from vllm_lite.llm import LLM

        self._llm = LLM(**{name: getattr(config, name) for name in config.__struct_fields__})

    def answer(self, prompt: str | list[Message], options: dict[str, Any]) -> Iterator[Piece]:
        from msgspec.structs import replace

        from vllm_lite.outputs import RequestOutput
        from vllm_lite.sampling_params import RequestOutputKind

        engine = self._llm.engine
        try:
            params = replace(
                self._llm.get_default_sampling_params(),
                **{"max_tokens": None, **options},
                output_kind=RequestOutputKind.DELTA,
            )
            ids = engine.tokenizer.encode_chat(prompt) if isinstance(prompt, list) else prompt
            engine.add_request("answer", ids, params)
        except ValueError as error:
            raise AnswerError(str(error)) from None
        num_tokens = 0
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    assert isinstance(output, RequestOutput)
                    if output.error is not None:
                        raise AnswerError(output.error)
                    for sample in output.outputs:
                        num_tokens += len(sample.token_ids)
                        yield Piece(sample.text, num_tokens)
        finally:
            engine.abort_request("answer")

    def close(self) -> None:
        self._llm.close()
