"""Typed reading of a parsed configuration file. Needs no torch."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REQUIRED: Any = object()


class Fields:
    """The values of one file. Getters raise ValueError with file, field, value and what it must be.

    A field that is absent or null takes ``default``; without one it is an error.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    def error(self, name: str, must: str) -> ValueError:
        value = self.values.get(name)
        return ValueError(f"{self.path}: {self._prefix}{name} is {value!r}; {must}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.path}: {self._prefix}{name} is missing")
        return default

    def integer(self, name: str, default: Any = _REQUIRED, minimum: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"it must be an integer of at least {minimum}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number above zero."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "it must be a number")
        if not (math.isfinite(value) and value > 0):
            raise self.error(name, "it must be finite and above 0")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "it must be a string")
        return value

    def token_ids(self, name: str) -> list[int]:
        """One id or a list of ids; empty when the field is absent."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise self.error(name, "it must be a token id or a list of token ids")
        return ids

    def section(self, name: str) -> "Fields":
        """A nested object; an empty one when the field is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "it must be an object")
        return Fields(self.path, value, f"{self._prefix}{name}.")


def read_json(path: Path) -> Fields:
    """Reads a JSON object; ValueError naming the file if it is absent or holds anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path}: the file is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds {type(values).__name__}, not a JSON object")
    return Fields(path, values)
