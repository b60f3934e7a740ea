"""Which vector a prompt is turned into."""

from typing import Literal

import msgspec

PoolingType = Literal["LAST", "MEAN"]


class PoolingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A vector of the model's last hidden states: that of the prompt's last token, which alone has
    seen all the others (the default, as vLLM's for models that generate), or the mean of all.

    normalize: the vector has length 1. dimensions: its first so many numbers; the rest is cut off
    before it is normalised. ``ValueError`` names the field and the value.
    """

    pooling_type: PoolingType = "LAST"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling_type not in ("LAST", "MEAN"):
            raise ValueError(f"pooling_type must be LAST or MEAN, got {self.pooling_type!r}")
        if not isinstance(self.normalize, bool):
            raise ValueError(f"normalize must be true or false, got {self.normalize!r}")
        if self.dimensions is not None and (
            type(self.dimensions) is not int or self.dimensions < 1
        ):
            raise ValueError(f"dimensions must be an integer from 1 on, got {self.dimensions!r}")

    def validate_for(self, hidden_size: int) -> None:
        """Raises ValueError if the model's vectors have fewer numbers than are asked for."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise ValueError(
                f"dimensions must be at most {hidden_size} (the model's hidden size), got "
                f"{self.dimensions}"
            )
