"""Values to fill a store with, and files to open: every dtype, every bit, every kind of .npy."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Literal

import numpy as np
import torch

EVERY_DTYPE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128),
)

# dtypes that a .safetensors can hold, as the format names them.
SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits: NaNs of any payload, infinities, negative zeros and subnormals are among them."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, size, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in C order, from any device."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def write_npy_file(
    path: Path,
    values: torch.Tensor,
    *,
    version: tuple[int, int] = (1, 0),
    fortran: bool = False,
    big_endian: bool = False,
    offset: int | None = None,
) -> Path:
    """Write ``values`` as a .npy file, byte by byte by the format's description.

    Args:
        path: the file.
        values: CPU tensor; bfloat16 and float8 become raw elements (``<V2``, ``|V1``).
        version: of the header.
        fortran: first dimension fastest.
        big_endian: byte order of the elements (no matter for those of one byte).
        offset: where the elements start; at a multiple of 64, when None.
    """
    size = values.dtype.itemsize
    order: Literal["<", ">"] = ">" if big_endian else "<"
    try:
        array = values.numpy()
        descr = array.dtype.newbyteorder(order).str
    except TypeError:
        array = values.view({1: torch.uint8, 2: torch.int16}[size]).numpy()
        descr = f"{order if size > 1 else '|'}V{size}"
    array = array.astype(array.dtype.newbyteorder(order))
    text = f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {tuple(values.shape)}, }}"
    prefix = b"\x93NUMPY" + bytes(version)
    width = "<H" if version == (1, 0) else "<I"
    start = len(prefix) + struct.calcsize(width)
    end = -(-(start + len(text) + 1) // 64) * 64 if offset is None else offset
    header = text.ljust(end - start - 1) + "\n"
    path.write_bytes(
        prefix + struct.pack(width, len(header)) + header.encode("latin-1") + array.tobytes("F" if fortran else "C")
    )
    return path


def write_safetensors_file(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write ``tensors`` as a .safetensors file, byte by byte by the format's description; offsets are not aligned."""
    fields, data = {}, b""
    for name, tensor in tensors.items():
        raw = bits(tensor)
        kind = SAFETENSORS_NAMES[tensor.dtype]
        fields[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps({"__metadata__": {"format": "pt"}, **fields}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path
