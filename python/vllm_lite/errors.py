"""Errors that an engine raises for one request. Bad input is a plain ``ValueError``."""


class EngineError(RuntimeError):
    """The request failed inside the engine; others go on."""


class ImpossibleError(EngineError):
    """What the request asks of its output cannot be fulfilled, which showed while it ran."""


class EngineDeadError(EngineError):
    """The engine cannot serve anything: it is down, restarting or closed."""


class QueueFullError(RuntimeError):
    """The waiting queue is at its bound; the request was not taken.

    ``retry_after``: seconds after which another try makes sense (sent as ``Retry-After``).
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
