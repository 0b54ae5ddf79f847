"""The .safetensors format: where each tensor lies, from a header that is not trusted. Pure: bytes in, places out.

A file is 8 bytes of length, that many of JSON, and the tensors' bytes: little-endian, C order, one after the other.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_SUFFIX = ".safetensors.index.json"
MOST_INDEX_BYTES = 100_000_000
_METADATA = "__metadata__"

# What the format calls an element -> torch's dtype, and the elements as NumPy can hold them.
_DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "BOOL": (torch.bool, "?"),
    "U8": (torch.uint8, "u1"),
    "I8": (torch.int8, "i1"),
    "U16": (torch.uint16, "<u2"),
    "I16": (torch.int16, "<i2"),
    "F16": (torch.float16, "<f2"),
    "BF16": (torch.bfloat16, "<u2"),
    "U32": (torch.uint32, "<u4"),
    "I32": (torch.int32, "<i4"),
    "F32": (torch.float32, "<f4"),
    "U64": (torch.uint64, "<u8"),
    "I64": (torch.int64, "<i8"),
    "F64": (torch.float64, "<f8"),
    "C64": (torch.complex64, "<c8"),
    "F8_E4M3": (torch.float8_e4m3fn, "u1"),
    "F8_E5M2": (torch.float8_e5m2, "u1"),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file.

    Attributes:
        shape: as the header says; rank 0 possible.
        kind: what the format calls its elements, known to rowferry or not.
        start, stop: its bytes, counted from the start of the file.
    """

    shape: tuple[int, ...]
    kind: str
    start: int
    stop: int

    def elements(self, label: str) -> tuple[torch.dtype, np.dtype[Any]]:
        """The torch dtype of its rows, and the NumPy dtype of its elements in the file.

        Raises:
            TypeError: elements that torch has no dtype for. ValueError: rank 0. Both call it ``label``.
        """
        if self.kind not in _DTYPES:
            raise TypeError(f"{label} has elements of {self.kind!r}; known are {', '.join(_DTYPES)}")
        if not self.shape:
            raise ValueError(f"{label} has rank 0, a single value; a store needs at least one dimension, its rows")
        dtype, stored = _DTYPES[self.kind]
        return dtype, np.dtype(stored)


def header_length(head: bytes, size: int, name: str) -> int:
    """Bytes of JSON after the file's first 8, which are ``head``; ``size`` is the file's.

    Raises:
        ValueError: longer than the file or than the format allows.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length < 2 or length > min(size - 8, MOST_HEADER_BYTES):
        raise ValueError(
            f"{name} is not a .safetensors file, or is cut off: it has {size:,} bytes and says that its header has {length:,}"
        )
    return length


def parse_header(text: bytes, size: int, name: str) -> dict[str, Tensor]:
    """The tensors by name.

    Args:
        text: the header's JSON, all of it.
        size: the file's bytes.
        name: what errors call the file.

    Raises:
        ValueError: no such JSON; a tensor that reaches outside the file, overlaps another one, or whose bytes are not
            those of its shape.
    """
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=_no_name_twice)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} has a broken .safetensors header: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{name} has a broken .safetensors header: it is no object, but starts with {text[:20]!r}")
    first = 8 + len(text)
    tensors = {key: _tensor(key, value, first, size, name) for key, value in fields.items() if key != _METADATA}
    end, before = first, "its header"
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start < end:
            raise ValueError(f"{name} has a broken .safetensors header: {key!r} overlaps {before!r}")
        end, before = tensor.stop, key
    return tensors


def tensor_named(array: str | None, tensors: dict[str, Tensor], name: str) -> tuple[str, Tensor]:
    """The tensor called ``array``, and its name; ``array`` may be None where there is one only.

    Raises:
        ValueError: there is none of that name in ``name``, the file.
    """
    if array is None and len(tensors) == 1:
        return next(iter(tensors.items()))
    if array is None or array not in tensors:
        raise ValueError(f"{name}: {_asked(array)}; it has {listed(tensors)}")
    return array, tensors[array]


def file_of(array: str | None, text: bytes, name: str) -> str:
    """Which of a model's files has the tensor ``array``: a file's name, which leads to no other folder.

    Args:
        array: its name; None is an error that lists those there are.
        text: the index, up to its first ``MOST_INDEX_BYTES + 1`` bytes.
        name: what errors call the index.

    Raises:
        ValueError: no such tensor, no index, or one that leads elsewhere.
    """
    try:
        if len(text) > MOST_INDEX_BYTES:
            raise ValueError(f"it has more than {MOST_INDEX_BYTES:,} bytes")
        files = json.loads(text)["weight_map"]
        if not isinstance(files, dict):
            raise ValueError("its weight_map is no object")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{name} is no index of .safetensors files: {error!r}") from error
    if array is None or array not in files:
        raise ValueError(f"{name}: {_asked(array)}; it has {listed(files)}")
    file = files[array]
    if not isinstance(file, str) or PurePath(file).name != file or not file.lower().endswith(".safetensors"):
        raise ValueError(f"{name} says that {array!r} is in {file!r}; it must be a .safetensors file beside it")
    return file


def _asked(array: str | None) -> str:
    return "pass array= to say which tensor" if array is None else f"there is no tensor {array!r}"


def listed(names: Any, most: int = 20) -> str:
    """Names for an error: all of a few, the first of many."""
    some = sorted(map(str, names))
    more = f", and {len(some) - most:,} more" if len(some) > most else ""
    return (", ".join(map(repr, some[:most])) or "none") + more


def _tensor(key: str, value: Any, first: int, size: int, name: str) -> Tensor:
    broken = f"{name} has a broken .safetensors header: {key[:200]!r}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise ValueError(f"{broken} is {str(value)[:200]}; a tensor has dtype, shape and data_offsets")
    shape, kind, offsets = value["shape"], value["dtype"], value["data_offsets"]
    if not _naturals(shape) or not isinstance(kind, str) or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"{broken} has shape {str(shape)[:100]}, dtype {str(kind)[:100]}, data_offsets {str(offsets)[:100]}")
    start, stop = first + offsets[0], first + offsets[1]
    if not first <= start <= stop <= size:
        raise ValueError(
            f"{broken} lies from byte {start:,} to {stop:,}, and the file has {size:,} bytes; it was cut off or made up"
        )
    if kind in _DTYPES and math.prod(shape) * _DTYPES[kind][0].itemsize != stop - start:
        raise ValueError(f"{broken} has {stop - start:,} bytes, which a shape of {shape} of {kind} does not have")
    return Tensor(tuple(shape), kind, start, stop)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields
