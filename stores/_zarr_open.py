"""Opening a zarr array: find it, check that its rows can be torch rows, describe it. Reads metadata only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.errors import NodeTypeValidationError
from zarr.storage import LocalStore, StorePath, ZipStore

from ._files import Mode
from ._views import BY_BITS

ROWFERRY_DTYPE = "rowferry_dtype"  # attribute: the torch dtype of elements that zarr knows only as integers


def open_path(path: Path, mode: Mode, array: str | None) -> zarr.Array[Any]:
    """The array at ``path``, or the one called ``array`` inside it. The caller closes a zip's ``.store``.

    Raises:
        FileNotFoundError: no such path. PermissionError: a zip for writing.
        ValueError: not zarr, no array of that name, or a group and ``array`` is missing.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    zipped = path.is_file()
    if zipped and path.suffix != ".zip":
        raise ValueError(f"{path} is a file; a zarr array is a directory or a .zip")
    if zipped and mode == "r+":
        raise PermissionError(f"{path} is a zip, which cannot be written in place; unpack it, or open it with mode='r'")
    store: Store = ZipStore(path, mode="r", read_only=True) if zipped else LocalStore(path, read_only=mode == "r")
    try:
        return _find(store, path, mode, (array or "").strip("/"))
    except BaseException:
        store.close()
        raise


def open_url(store: Store, url: str, array: str | None) -> zarr.Array[Any]:
    """As ``open_path``, of a store behind a URL, to read. A URL at which nothing is found is a FileNotFoundError."""
    return _find(store, url, "r", (array or "").strip("/"))


def _find(store: Store, path: Path | str, mode: Mode, name: str) -> zarr.Array[Any]:
    where = f"{path}, array {name!r}" if name else str(path)
    try:
        # By its own path, so that an old copy of its metadata in a consolidated group is not used.
        return open_array(store, name, mode)
    except NodeTypeValidationError:
        pass  # a group: the message needs its arrays
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where} cannot be opened: {error}") from error
    remote = isinstance(path, str)
    try:
        group = zarr.open_group(store, mode="r", use_consolidated=None if remote else False)
    except (FileNotFoundError, NodeTypeValidationError, ValueError, KeyError) as error:
        if name:
            raise ValueError(f"{path} is no group with an array {name!r}") from error
        kind = FileNotFoundError if remote else ValueError
        raise kind(f"{path} holds no zarr array: no zarr.json, .zarray or .zgroup was found in it") from error
    if str(path).startswith("http") and group.metadata.consolidated_metadata is None:
        names = "not listed by an HTTP server"
    else:
        names = (
            ", ".join(sorted(key for key, member in group.members(max_depth=None) if isinstance(member, zarr.Array))) or "none"
        )
    if name:
        raise ValueError(f"{path} has no array {name!r}; its arrays: {names}")
    raise ValueError(f"{path} is a group; name one of its arrays with array=. Its arrays: {names}")


def open_array(store: Store, name: str, mode: Mode) -> zarr.Array[Any]:
    """The array called ``name`` (empty for the store's root); bfloat16 and float8, which zarr does not know, as integers.

    Raises:
        What ``zarr.open_array`` raises.
    """
    try:
        return zarr.open_array(store, path=name, mode=mode)
    except ValueError as error:
        place = StorePath(store, name)
        found = sync((place / "zarr.json").get())
        document: Any = json.loads(found.to_bytes()) if found is not None else {}
        dtype = document.get("data_type")
        known = {str(each).removeprefix("torch."): each for each in BY_BITS}
        if document.get("node_type") != "array" or dtype not in known:
            raise
        bits = f"uint{8 * known[dtype].itemsize}"
        document |= {"data_type": bits, "fill_value": _bits(document["fill_value"], known[dtype])}
        document["attributes"] = {**document.get("attributes", {}), ROWFERRY_DTYPE: dtype}
        try:
            return zarr.Array(zarr.AsyncArray(document, place))
        except (ValueError, TypeError, KeyError):
            raise error from None


def _bits(value: Any, dtype: torch.dtype) -> int:
    """A fill value as JSON has it (a number, ``"NaN"``, ``"-Infinity"``, bits as ``"0x7fc0"``) as the integer of its bits."""
    if isinstance(value, str) and value.startswith("0x"):
        return int(value, 16)
    number = torch.tensor(float(value)).to(dtype)
    return int.from_bytes(number.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy().tobytes(), "little")


def element_types(array: zarr.Array[Any], wanted: torch.dtype | None, name: str) -> tuple[torch.dtype, np.dtype[Any]]:
    """The torch dtype of ``array``'s elements, and the NumPy dtype (native byte order) that has the same bits.

    Args:
        array: the array.
        wanted: for elements that zarr has no type for (bfloat16, float8): what integers or raw bits of their size are.
        name: what errors call the array.

    Raises:
        TypeError: elements that torch has no dtype for, or ``wanted`` is neither their dtype nor their size.
    """
    stored = array.dtype
    if not isinstance(stored, np.dtype) or stored.kind not in "biufcV" or stored.names is not None:
        raise TypeError(f"{name} has elements of {stored}; rows must be bool, integers, floats or complex numbers")
    if wanted is None and isinstance(array.attrs.get(ROWFERRY_DTYPE), str):
        wanted = getattr(torch, str(array.attrs[ROWFERRY_DTYPE]), None)
    if wanted in BY_BITS and stored.kind in "iuV" and stored.itemsize == wanted.itemsize:
        return wanted, np.dtype(f"u{stored.itemsize}" if stored.kind == "V" else stored.newbyteorder("="))
    if stored.kind == "V":
        raise TypeError(
            f"{name} has raw elements of {stored.itemsize} bytes; say what they are: dtype=torch.bfloat16, or a float8"
        )
    native = stored.newbyteorder("=")
    try:
        natural = torch.from_numpy(np.empty(0, native)).dtype
    except TypeError as error:
        raise TypeError(f"{name} has elements of {stored}, which torch has no dtype for") from error
    if wanted not in (None, natural):
        raise TypeError(
            f"{name} has elements of {stored}, so its rows are {natural}, not {wanted}. Cast with the pipeline's dtype=; "
            f"dtype= here is for elements that zarr has no type for: bfloat16 kept as 2-byte integers, float8 as 1-byte ones"
        )
    return natural, native


def describe(array: zarr.Array[Any]) -> dict[str, Any]:
    """What ``ZarrStore.describe`` returns; plain Python values."""
    attrs: dict[str, Any] = dict(array.attrs)
    names = getattr(array.metadata, "dimension_names", None) or attrs.get("_ARRAY_DIMENSIONS")  # the latter: xarray's, in v2
    return {
        "dimension_names": list(names) if names else None,
        "units": attrs.get("units"),
        "scale_factor": attrs.get("scale_factor"),
        "add_offset": attrs.get("add_offset"),
        "chunks": list(array.chunks),
        "shards": list(array.shards) if array.shards else None,
        "compressor": [_codec_name(codec) for codec in array.compressors],
        "zarr_format": array.metadata.zarr_format,
    }


def is_raw(array: zarr.Array[Any]) -> bool:
    """Whether a chunk's bytes are its elements': every chunk has the same size on disk, known before it is written."""
    return not array.compressors and not array.filters


def _codec_name(codec: Any) -> str:
    return str(getattr(codec, "codec_id", None) or codec.to_dict().get("name"))
