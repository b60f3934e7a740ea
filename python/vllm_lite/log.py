"""The one logging set-up of vllm_lite's own processes. A program that imports the package keeps its
own.
"""

import logging
import os
import sys

_QUIET_PATHS = ("/health", "/metrics")


def configure(role: str) -> None:
    """INFO of vllm_lite and warnings of everything else to stderr, each line with the process's
    role.

    VLLM_LITE_LOG_LEVEL (DEBUG, INFO, WARNING, ERROR) sets vllm_lite's level.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s [{role}] %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("vllm_lite").setLevel(_level())
    access = logging.getLogger("uvicorn.access")
    access.setLevel(logging.INFO)
    access.addFilter(_is_no_poll)
    logging.captureWarnings(True)


def _level() -> int:
    name = os.environ.get("VLLM_LITE_LOG_LEVEL", "INFO").upper()
    level = logging.getLevelNamesMapping().get(name)
    if level is None:
        raise ValueError(f"VLLM_LITE_LOG_LEVEL is {name!r}; use DEBUG, INFO, WARNING or ERROR")
    return level


def _is_no_poll(record: logging.LogRecord) -> bool:
    """Access lines of health checks and scrapes would drown all others."""
    # uvicorn's arguments: client address, method, path, HTTP version, status.
    if not isinstance(record.args, tuple) or len(record.args) < 3:
        return True
    return str(record.args[2]).partition("?")[0] not in _QUIET_PATHS
