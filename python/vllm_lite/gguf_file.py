"""Reads GGUF files: metadata, and tensors as raw blocks through a memory map.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian. Needs neither torch nor the ``gguf``
package (whose reader takes seconds on a 50,000-token vocabulary).
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

# ggml type number -> (name, elements in a block, bytes in a block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file is not a GGUF file that can be read; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # row-major, as torch has it (the file lists the dimensions backwards)
    ggml_type: int
    offset: int  # bytes from the beginning of the file
    num_bytes: int


class GgufFile:
    """A context manager. ``metadata``: key -> value; ``tensors``: name -> GgufTensor.

    ``vocabulary=False`` leaves out the arrays below ``tokenizer.``, 100,000 strings or more: a
    quarter of the time, and Python keeps 5 of the 8 MB that the strings take for a moment.
    """

    def __init__(self, path: str | Path, *, vocabulary: bool = True) -> None:
        self.path = Path(path)
        self._vocabulary = vocabulary
        with self.path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise GgufError(f"{self.path}: the file is empty") from error
        self._position = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, KeyError) as error:
            self.close()
            raise GgufError(f"{self.path}: damaged or cut-off GGUF header ({error})") from error
        except GgufError:
            self.close()
            raise

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._data.close()

    def tensor_bytes(self, tensor: GgufTensor) -> memoryview:
        """The tensor's blocks as they lie in the file.

        Valid until ``close``, which raises BufferError while views are alive.
        """
        return memoryview(self._data)[tensor.offset : tensor.offset + tensor.num_bytes]

    def _parse(self) -> None:
        magic, version, num_tensors, num_metadata = self._unpack("<4sIQQ")
        if magic != b"GGUF":
            raise GgufError(f"{self.path}: not a GGUF file (it begins with {magic!r})")
        if version not in (2, 3):
            raise GgufError(f"{self.path}: GGUF version {version}; 2 and 3 are supported")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key = self._string()
            (value_type,) = self._unpack("<I")
            if value_type == _ARRAY and not self._vocabulary and key.startswith("tokenizer."):
                self._skip_array()
            else:
                self.metadata[key] = self._value(value_type)
        found = []
        for _ in range(num_tensors):
            name = self._string()
            (num_dims,) = self._unpack("<I")
            dims = self._unpack(f"<{num_dims}Q")
            ggml_type, offset = self._unpack("<IQ")
            found.append((name, tuple(reversed(dims)), ggml_type, offset))
        alignment = int(self.metadata.get("general.alignment", 32))
        data_start = (self._position + alignment - 1) // alignment * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, ggml_type, offset in found:
            if ggml_type not in GGML_TYPES:
                known = ", ".join(type_name for type_name, _, _ in GGML_TYPES.values())
                raise GgufError(
                    f"{self.path}: tensor {name} has ggml type {ggml_type}; supported: {known}"
                )
            type_name, block_elements, block_bytes = GGML_TYPES[ggml_type]
            if shape and shape[-1] % block_elements:
                raise GgufError(
                    f"{self.path}: tensor {name} has rows of {shape[-1]} elements, not whole "
                    f"{type_name} blocks of {block_elements}"
                )
            num_bytes = prod(shape) // block_elements * block_bytes
            start = data_start + offset
            if start + num_bytes > len(self._data):
                raise GgufError(f"{self.path}: cut off: tensor {name} ends beyond the file")
            self.tensors[name] = GgufTensor(name, shape, ggml_type, start, num_bytes)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        end = self._position + length
        if end > len(self._data):
            raise GgufError(f"{self.path}: cut off in a string of {length} bytes")
        text = self._data[self._position : end].decode()
        self._position = end
        return text

    def _skip_array(self) -> None:
        element_type, length = self._unpack("<IQ")
        if element_type in _SCALARS:
            self._position += length * struct.calcsize("<" + _SCALARS[element_type])
        elif element_type == _STRING:
            read, data, position = struct.Struct("<Q").unpack_from, self._data, self._position
            for _ in range(length):
                position += 8 + read(data, position)[0]
            self._position = position
        else:
            raise GgufError(f"{self.path}: unknown metadata type {element_type} in an array")

    def _value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            element_type, length = self._unpack("<IQ")
            if element_type in _SCALARS:
                return list(self._unpack(f"<{length}{_SCALARS[element_type]}"))
            return [self._value(element_type) for _ in range(length)]
        if value_type not in _SCALARS:
            raise GgufError(f"{self.path}: unknown metadata type {value_type}")
        return self._unpack("<" + _SCALARS[value_type])[0]
