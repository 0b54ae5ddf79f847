"""The .npy format: what a header says, and how one is written. Pure: bytes in, bytes out; nothing is unpickled."""

from __future__ import annotations

import ast
import io
import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ._views import BY_BITS

MOST_HEADER_BYTES = 1 << 16  # what a caller needs to read of a file's start; a plain array's header has some 100
_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
_IN_NUMPY = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_LITTLE = "<" if sys.byteorder == "little" else ">"


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What the first bytes of a .npy file say about the rest.

    Attributes:
        shape: ``(rows, *row_shape)``.
        dtype: torch dtype of the rows.
        stored: NumPy dtype of the elements in the file, with their byte order; unsigned integers where NumPy has
            no type for them.
        fortran: the first dimension varies fastest.
        offset: bytes before the first element; any number.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: np.dtype[Any]
    fortran: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; those after them in the file are not the array's."""
        return math.prod(self.shape) * self.stored.itemsize


def parse_header(head: bytes, wanted: torch.dtype | None, name: str) -> NpyHeader:
    """The header at the start of a file.

    Args:
        head: the file's first ``MOST_HEADER_BYTES`` bytes, or all of them.
        wanted: dtype of elements that NumPy has no type for (bfloat16, float8), stored as raw bytes or integers.
        name: what errors call the file.

    Raises:
        ValueError: no .npy file, of a version that is not known, broken, or of rank 0.
        TypeError: elements that are no numbers or bools, that torch has no dtype for, or need ``wanted``.
    """
    fields, offset = _fields(head, name)
    if set(fields) != {"descr", "fortran_order", "shape"} or not isinstance(fields["fortran_order"], bool):
        raise ValueError(f"{name} has a broken .npy header: {str(fields)[:200]}")
    shape = fields["shape"]
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{name} has a broken .npy header: its shape is {str(shape)[:200]}")
    if not shape:
        raise ValueError(f"{name} has rank 0, a single value; a store needs at least one dimension, its rows")
    dtype, stored = _elements(fields["descr"], wanted, name)
    if math.prod(n for n in shape if n) * stored.itemsize >= 1 << 63:
        raise ValueError(f"{name} has a broken .npy header: an array of shape {shape} is larger than any memory")
    return NpyHeader(shape, dtype, stored, fields["fortran_order"], offset)


def header_bytes(shape: tuple[int, ...], dtype: torch.dtype, align: int = 64) -> bytes:
    """The header of a C-ordered array in native byte order, padded to a multiple of ``align`` bytes (a multiple of 64).

    bfloat16 and float8 are written as raw bytes of their size (``<V2``, ``|V1``), as other libraries do.

    Raises:
        TypeError: .npy has no way to hold ``dtype``.
    """
    if dtype in BY_BITS:
        descr = f"{_LITTLE if dtype.itemsize > 1 else '|'}V{dtype.itemsize}"
    elif dtype in _IN_NUMPY:
        descr = np.dtype(str(dtype).removeprefix("torch.")).str
    else:
        raise TypeError(f"a .npy file cannot hold {dtype}; use a numeric or bool dtype that NumPy has, bfloat16 or float8")
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": shape})
    plain = head.getvalue()
    text = plain[10:-1] + b" " * (-len(plain) % align) + b"\n"
    return plain[:8] + len(text).to_bytes(2, "little") + text


def _fields(head: bytes, name: str) -> tuple[dict[str, Any], int]:
    """The header's dictionary, and where the elements start."""
    if not head:
        raise ValueError(f"{name} is empty (0 bytes), not a .npy file; it was never written, or cut off")
    if head.startswith(b"PK\x03\x04"):
        raise ValueError(f"{name} is a .npz or zip archive, which cannot be mapped; save its arrays as .npy files")
    if head[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{name} is not a .npy file: it starts with {head[:6]!r}, not {_MAGIC!r}")
    version = tuple(head[6:8])
    if len(head) < 8 or version not in _LENGTH_BYTES:
        known = ", ".join(f"{a}.{b}" for a, b in _LENGTH_BYTES)
        raise ValueError(f"{name} has .npy version {'.'.join(map(str, version)) or 'none'}; known are {known}")
    start = 8 + _LENGTH_BYTES[version]
    length = int.from_bytes(head[8:start], "little")
    if start + length > MOST_HEADER_BYTES:
        raise ValueError(f"{name} has a header of {length:,} bytes; no plain array needs more than {MOST_HEADER_BYTES:,}")
    if start + length > len(head):
        raise ValueError(f"{name} is cut off inside its header: {len(head):,} bytes of {start + length:,}")
    text = head[start : start + length].decode("utf-8" if version >= (3, 0) else "latin-1", errors="replace")
    try:
        fields = ast.literal_eval(re.sub(r"(\d)L\b", r"\1", text).strip())  # Python 2 wrote long integers as 3L
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{name} has a broken .npy header: {text[:200]!r}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{name} has a broken .npy header: {text[:200]!r}")
    return fields, start + length


def _elements(descr: object, wanted: torch.dtype | None, name: str) -> tuple[torch.dtype, np.dtype[Any]]:
    """The torch dtype of the rows, and the NumPy dtype of the file's elements."""
    if not isinstance(descr, str):
        raise TypeError(f"{name} has structured elements ({str(descr)[:200]}); rows must be of one numeric or bool dtype")
    try:
        stored = np.dtype(descr)
    except TypeError as error:
        raise TypeError(f"{name} has elements of {descr!r}, which NumPy does not know") from error
    if stored.hasobject:
        raise TypeError(
            f"{name} has elements of type object, which are pickled; rowferry unpickles nothing. Save numbers instead"
        )
    if stored.kind not in "biufcV" or stored.names is not None or not stored.itemsize:
        raise TypeError(f"{name} has elements of {descr!r}; rows must be bool, integers, floats or complex numbers")
    if wanted in BY_BITS and stored.kind in "iuV" and stored.itemsize == wanted.itemsize:
        return wanted, np.dtype(f"{'>' if descr.startswith('>') else '<'}u{stored.itemsize}")
    if stored.kind == "V":
        raise TypeError(
            f"{name} has raw elements of {stored.itemsize} bytes ({descr!r}); say what they are with dtype=, "
            f"such as torch.bfloat16 for 2 bytes or torch.float8_e4m3fn for 1"
        )
    try:
        natural = torch.from_numpy(np.empty(0, stored.newbyteorder("="))).dtype
    except TypeError as error:
        raise TypeError(f"{name} has elements of {descr!r} ({stored}), which torch has no dtype for") from error
    if wanted not in (None, natural):
        raise TypeError(
            f"{name} has elements of {stored}, so its rows are {natural}, not {wanted}. Cast with the pipeline's dtype=; "
            f"dtype= here is for bfloat16 stored as raw elements or integers of 2 bytes, and float8 as those of 1 byte"
        )
    return natural, stored
