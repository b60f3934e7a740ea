"""Filling a model's parameters from a checkpoint, each exactly once."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

ProgressCallback = Callable[[int, int], None]  # (bytes done, bytes in all)

_NAMES_IN_MESSAGE = 5


class Place(Protocol):
    """Where a tensor goes that the checkpoint does not simply write."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def load(self, checkpoint: "Checkpoint", name: str) -> None: ...

    def pack(self, values: torch.Tensor) -> None:
        """values: of this shape, in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of the checkpoint goes; ``target`` may be rows of a fused parameter."""

    name: str  # in Hugging Face's spelling
    target: torch.Tensor | Place


class Checkpoint(Protocol):
    """A set of named tensors in files. Names are Hugging Face's, whatever the files call them."""

    path: Path
    # Divides the rotary frequencies, float32 [rotary_size / 2]; GGUF files of llama3-scaled models
    # have it.
    rope_divisors: torch.Tensor | None

    def names(self) -> Collection[str]:
        """All tensors."""

    def describe(self, name: str) -> str:
        """File and tensor, for messages."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def num_bytes(self, name: str) -> int:
        """Bytes in the file."""

    def read(self, name: str, target: torch.Tensor) -> None:
        """Writes the tensor into ``target`` (of its shape), in ``target``'s dtype."""

    def block_format(self, name: str) -> str | None:
        """The name of the quantised format that the file has the tensor in; None: it has none."""

    def read_blocks(self, name: str) -> torch.Tensor:
        """A quantised tensor's own bytes: uint8 ``[rows, bytes of a row]``."""

    def close(self) -> None: ...


def load_weights(
    slots: Iterable[Slot],
    checkpoint: Checkpoint,
    is_ignorable: Callable[[str], bool],
    progress: ProgressCallback | None = None,
) -> None:
    """Fills every slot; nothing is read before all names and shapes are known to match.

    Raises ValueError naming file and tensor: missing, not wanted (and not ``is_ignorable``), of
    another shape, or out of range in the target's dtype.
    """
    wanted: dict[str, Slot] = {}
    for slot in slots:
        assert slot.name not in wanted, f"two parameters take {slot.name}"
        wanted[slot.name] = slot
    present = checkpoint.names()
    _refuse(checkpoint, "has no tensor", [name for name in wanted if name not in present])
    surplus = [name for name in present if name not in wanted and not is_ignorable(name)]
    _refuse(checkpoint, "holds tensors that the model has no place for:", surplus)
    for name, slot in wanted.items():
        shape, expected = checkpoint.shape(name), tuple(slot.target.shape)
        if shape != expected:
            raise ValueError(
                f"{checkpoint.describe(name)} has shape {list(shape)}; "
                f"by the configuration it must be {list(expected)}"
            )
    total = sum(checkpoint.num_bytes(name) for name in wanted)
    done = 0
    for name, slot in wanted.items():
        if not isinstance(slot.target, torch.Tensor):
            slot.target.load(checkpoint, name)
        elif slot.target.device.type == "cpu":
            read_values(checkpoint, name, slot.target)
        else:
            staging = torch.empty_like(slot.target, device="cpu")
            read_values(checkpoint, name, staging)
            slot.target.copy_(staging)
        done += checkpoint.num_bytes(name)
        if progress:
            progress(done, total)


def read_values(checkpoint: Checkpoint, name: str, target: torch.Tensor) -> None:
    """``checkpoint.read``; ValueError for values that are out of range in the target's dtype."""
    checkpoint.read(name, target)
    # float16 ends at 65504; an infinity here would only show as nonsense much later.
    if target.dtype == torch.float16 and not bool(target.isfinite().all()):
        raise ValueError(
            f"{checkpoint.describe(name)} holds values that are not finite in float16; "
            "use dtype bfloat16 or float32"
        )


def _refuse(checkpoint: Checkpoint, what: str, names: list[str]) -> None:
    if names:
        listed = ", ".join(names[:_NAMES_IN_MESSAGE])
        more = len(names) - _NAMES_IN_MESSAGE
        raise ValueError(
            f"{checkpoint.path}: {what} {listed}" + (f" and {more} more" if more > 0 else "")
        )
