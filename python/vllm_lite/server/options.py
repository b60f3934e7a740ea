"""What an operator can set about the HTTP server."""

from dataclasses import dataclass

from vllm_lite.output_formats import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_LONGEST = 1_000_000  # seconds


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
    trust_request_chat_template: bool = False  # take chat_template from requests
    tool_call_parser: str = AUTO  # a name of TOOL_FORMATS; auto: what the chat template speaks of
    reasoning_parser: str = AUTO  # a name of REASONING_FORMATS

    def __post_init__(self) -> None:
        bounds = {
            "max_body_bytes": (1, _INT32_MAX),
            "max_pending_body_bytes": (self.max_body_bytes, _INT64_MAX),
            "max_choices": (1, _INT32_MAX),
            "shutdown_grace": (0, _LONGEST),
            "keep_alive": (0, _LONGEST),
            "backlog": (1, 65535),
            "threads": (1, 1024),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:  # false for NaN, too
                raise ValueError(f"{name} is {value}; it must be from {least} to {most}")
        formats = {"tool_call_parser": TOOL_FORMATS, "reasoning_parser": REASONING_FORMATS}
        for name, known in formats.items():
            value = getattr(self, name)
            if value not in (AUTO, NONE, *known):
                raise ValueError(
                    f"{name} must be one of {', '.join((AUTO, NONE, *known))}, got {value!r}"
                )
        if not all(self.api_keys):
            raise ValueError("api_keys holds an empty key; remove it or set a real one")
