"""What all clients are asked."""

from importlib.util import find_spec
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

MODEL = "smollm2"
KEY = "secret"

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class Reading(BaseModel):
    """The weather at one place.

    So narrow that a grammar leads any model to a whole one within few tokens.
    """

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Berlin"]
    degrees: int = Field(ge=-40, le=50)
    raining: bool


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "report",
        "description": "Writes down a reading of the weather.",
        "parameters": Reading.model_json_schema(),
    },
}
WEATHER: list[Any] = [{"role": "user", "content": "It is 21 degrees in Paris, no rain. Report it."}]


def needs(package: str) -> pytest.MarkDecorator:
    """Skips where it is not installed; it is imported by the tests that run, as that takes long."""
    missing = find_spec(package) is None
    return pytest.mark.skipif(
        missing, reason=f"{package} is not installed; run `make test-clients`"
    )


def cosine(a: list[float], b: list[float]) -> float:
    """Of vectors of length 1."""
    return sum(x * y for x, y in zip(a, b, strict=True))
