"""One HTTP connection: uvicorn's, with bounds on what a client may send and how slowly."""

import asyncio
import http
from email.utils import formatdate

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm_lite.server.errors import ApiError, bad_request, unavailable

MAX_HEAD_BYTES = 64 << 10  # request line and headers
# Until a request is complete, every period of so many seconds must bring so many bytes of it.
STALL_SECONDS = 15.0
LEAST_BYTES = 64 << 10
# How long a refused client may go on sending before it is cut off. Cut off at once it might not see
# the answer: the kernel drops that when more arrives for a socket that is closed.
_LINGER = 1.0
# Bytes of framing that each byte of a chunked body may bring: it may come one byte a chunk.
_FRAMING = 8

# In a request's scope: ``_write_part``. Tokens of streams go this way, not through six layers that
# have nothing to do with them.
WRITE_PART = "vllm_lite.write_part"


class _Pipelined(Exception):
    """A request began before the last one was answered."""


class Connection(HttpToolsProtocol):
    """What is refused here is answered in OpenAI's shape, and the connection ends.

    A request that comes before the last one is answered is not read: the connection ends after that
    answer. So reading never has to pause for it, and a client that leaves is noticed at once.
    """

    _allowance = MAX_HEAD_BYTES  # bytes that may come until the head or some body is complete
    _deaf = False  # what comes is dropped
    _received = 0  # bytes in this period
    _timer: asyncio.TimerHandle | None = None  # set while a request is incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        rest = memoryview(data)
        while rest and not self._deaf:
            piece, rest = rest[: self._allowance], rest[self._allowance :]
            self._allowance -= len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                self._end_after_answer()  # no other protocol is spoken; the parser has stopped
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, _Pipelined):
                    self._end_after_answer()
                else:
                    self._refuse(bad_request(f"the request is not valid HTTP/1.1: {error}"))
            if self._allowance == 0 and not self._deaf:
                self._refuse(
                    ApiError(
                        431,
                        "the request's line and headers, or the framing of its chunks, take more"
                        f" than {MAX_HEAD_BYTES} bytes",
                        code="request_header_fields_too_large",
                    )
                )

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            raise _Pipelined
        self.cycle = None  # type: ignore[assignment]  # until the headers are complete
        self._unset_keepalive_if_required()
        self._watch()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._allowance = MAX_HEAD_BYTES
        self.scope[WRITE_PART] = self._write_part  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._allowance = min(MAX_HEAD_BYTES, self._allowance + (1 + _FRAMING) * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._allowance = MAX_HEAD_BYTES
        self._unwatch()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._timer is not None:  # an error that did not wait for the rest of the body
            self._end()

    def shutdown(self) -> None:
        if self._timer is not None:
            self._refuse(unavailable("the server is shutting down; send the request again"))
        else:
            super().shutdown()

    def _write_part(self, data: bytes) -> bool:
        """Does at once what ``send`` of a part of a streamed body would, past all middleware.

        False, and nothing done, where ``send`` has more to do, such as to wait for the client.
        """
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    # --- a request's progress ---------------------------------------------------------------------

    def _watch(self) -> None:
        self._received = 0
        self._timer = self.loop.call_later(STALL_SECONDS, self._check_progress)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self) -> None:
        # While reading is paused it is the server that is slow.
        if self._received >= LEAST_BYTES or self.flow.read_paused:
            self._watch()
            return
        self._refuse(
            ApiError(
                408,
                f"the request is incomplete and only {self._received} bytes of it came in"
                f" {STALL_SECONDS:g} s; at least {LEAST_BYTES} are expected",
                code="request_timeout",
            )
        )

    # --- the end ----------------------------------------------------------------------------------

    def _end_after_answer(self) -> None:
        self._deaf = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _refuse(self, error: ApiError) -> None:
        """Answers the request that is coming in, unless it has an answer, and ends."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started:
            if cycle is not None:  # for the application the client is gone
                cycle.disconnected = True
                cycle.message_event.set()
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"date: {formatdate(usegmt=True)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._end()

    def _end(self) -> None:
        self._deaf = True
        self._unwatch()
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.transport.write_eof()
            self.loop.call_later(_LINGER, self.transport.abort)
