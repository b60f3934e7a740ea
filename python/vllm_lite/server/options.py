"""What an operator can set about the HTTP server."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ServerOptions:
    """Limits are checked when the object is made; ``ValueError`` names the field and the bound."""

    api_keys: tuple[str, ...] = ()  # empty: no authentication
    max_body_bytes: int = 32 << 20  # one request body
    max_pending_body_bytes: int = 512 << 20  # all bodies being read or tokenised; above: 429
    max_choices: int = 256  # prompts x n of one request
    shutdown_grace: float = 30.0  # seconds that running requests get after the first signal
    keep_alive: float = 60.0  # seconds an idle connection stays open
    backlog: int = 2048  # connections that the kernel queues per socket
    threads: int = 4  # threads that parse, template and tokenise
    cors_origins: tuple[str, ...] = ()  # empty: no CORS headers at all
    access_log: bool = False

    def __post_init__(self) -> None:
        at_least = {
            "max_body_bytes": 1,
            "max_pending_body_bytes": self.max_body_bytes,
            "max_choices": 1,
            "shutdown_grace": 0,
            "keep_alive": 0,
            "backlog": 1,
            "threads": 1,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not all(self.api_keys):
            raise ValueError("api_keys holds an empty key; remove it or set a real one")
