"""Weights of a Hugging Face directory: model.safetensors, or shards with an index."""

from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_lite.loader.fields import read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class SafetensorsCheckpoint:
    """Files are mapped, not read: a tensor's pages come in when it is copied to its place."""

    rope_divisors: torch.Tensor | None = None

    def __init__(self, directory: Path) -> None:
        """Opens every file and checks names against the index and dtypes.

        Raises ValueError naming file and tensor for whatever is absent, damaged or not supported.
        """
        self.path = directory
        self._slices: dict[str, Any] = {}
        self._files: dict[str, Path] = {}
        if (directory / _SINGLE).is_file():
            self._open(directory / _SINGLE, None)
        elif (directory / _INDEX).is_file():
            self._open_shards(directory)
        else:
            raise ValueError(_no_weights(directory))

    def names(self) -> Collection[str]:
        return self._files.keys()

    def describe(self, name: str) -> str:
        return f"{self._files[name]}: tensor {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def num_bytes(self, name: str) -> int:
        return prod(self.shape(name)) * _ITEM_BYTES[self._slices[name].get_dtype()]

    def read(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self._slices[name][...])

    def block_format(self, name: str) -> None:
        return None

    def read_blocks(self, name: str) -> torch.Tensor:
        raise NotImplementedError("safetensors hold no quantised blocks")

    def close(self) -> None:
        """Drops the maps."""
        self._slices.clear()

    def _open_shards(self, directory: Path) -> None:
        index = read_json(directory / _INDEX)
        weight_map = index.section("weight_map").values
        if not weight_map:
            raise index.error("weight_map", "it must map tensor names to files")
        shards: dict[str, set[str]] = {}
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ValueError(f"{index.path}: {tensor} is in {shard!r}, which is no file name")
            shards.setdefault(shard, set()).add(tensor)
        for shard, tensors in shards.items():
            self._open(directory / shard, tensors)

    def _open(self, path: Path, indexed: set[str] | None) -> None:
        """``indexed``: the tensors that the index puts into this file."""
        try:
            file: Any = safe_open(str(path), framework="pt")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise ValueError(f"{path}: the file is missing, though {_INDEX} names it") from error
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged or cut-off safetensors file ({error})") from error
        if indexed is not None and indexed != slices.keys():
            for name in sorted(indexed - slices.keys()):
                raise ValueError(f"{path}: has no tensor {name}, though {_INDEX} says so")
            name = min(slices.keys() - indexed)
            raise ValueError(f"{path}: holds tensor {name}, which {_INDEX} does not put there")
        for name, view in slices.items():
            if view.get_dtype() not in _ITEM_BYTES and not name.endswith("rotary_emb.inv_freq"):
                raise ValueError(
                    f"{path}: tensor {name} has dtype {view.get_dtype()}; "
                    f"supported: {', '.join(_ITEM_BYTES)}"
                )
            self._slices[name] = view
            self._files[name] = path


def _no_weights(directory: Path) -> str:
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    pickled += sorted(path.name for path in directory.glob("*.pt*"))
    if pickled:
        return (
            f"{directory}: holds weights only as {pickled[0]}; loading it could run "
            "code hidden in it, so only safetensors is read. Convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return f"{directory}: holds neither {_SINGLE} nor {_INDEX}"
