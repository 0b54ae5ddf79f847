"""From a path or an object to a store: the suffix decides, and the kind of array."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ._array import ArrayStore
from ._commit_record import remove_leftovers
from ._contract import Store
from ._device import DeviceStore
from ._file_reads import Cache
from ._file_writes import Durability, check_durability
from ._files import Mode, beside, publish, refuse_existing
from ._layout import check_layout
from ._memmap import MemmapStore, write_npy
from ._part import PartStore
from ._remote_store import RemoteStore
from ._safetensors import SafetensorsStore
from ._safetensors_header import INDEX_SUFFIX
from ._select import refuse_to_write, selection_of
from ._url import is_url, kind_of_url, parse_url, refuse_to_write_url
from ._zarr import ZarrStore
from ._zarr_create import create_zarr

_SUFFIXES = "known are .npy (a file), .zarr (a directory, or a .zip of one) and .safetensors (to read)"


def open_store(
    path: str | os.PathLike[str],
    mode: Mode = "r",
    *,
    array: str | None = None,
    dtype: torch.dtype | None = None,
    select: Any = None,
    cache: Cache = "keep",
    durability: Durability = "flush",
    storage_options: Mapping[str, Any] | None = None,
) -> Store:
    """The rows of a file: a ``MemmapStore`` for .npy, a ``ZarrStore`` for .zarr, .zip or another directory, a
    ``SafetensorsStore`` for one tensor of a .safetensors, or of a model split over several, by its .safetensors.index.json.
    Behind a URL: a ``ZarrStore`` for .zarr, a ``RemoteStore`` for the others.

    Reads the header or metadata only, and changes no byte of the file.

    Args:
        path: a local path, or a URL (``s3://``, ``http://``, ``https://``; ``gs://`` and ``az://`` untested), which needs
            ``rowferry[remote]``.
        mode: ``"r"``, or ``"r+"`` to write a local file (then it is locked against other writers).
        array: name of an array inside a zarr group, or of a tensor inside a .safetensors.
        dtype: what elements are that the format has no type for, such as ``torch.bfloat16``. No cast.
        select: a part of each row, with ``mode="r"`` only: an index of one row, as NumPy's basic indexing takes it, of
            ints, slices with positive steps and ``...``. ``np.s_[:, 0:64]`` of rows ``(3, 128)`` makes rows ``(3, 64)``,
            ``0`` makes rows ``(128,)``. Of a .npy it is a view; of a zarr, chunks outside of it are not read.
        cache: of a .npy or .safetensors: "drop" gives up the page cache's copy of rows from the disk; see MemmapStore.
        durability: of a .npy that is written: "flush", or "atomic": after a crash, the last flush; see MemmapStore.
        storage_options: of a URL: passed on to obstore; see ``RemoteStore``.

    Raises:
        PermissionError: a URL is to be written. ImportError: without ``rowferry[remote]``, for a URL.
        FileNotFoundError: nothing is there. ValueError: of no known kind, broken, or cut off.
        TypeError: elements that cannot be rows. BlockingIOError: open for writing elsewhere.
    """
    if is_url(path):
        refuse_to_write_url(path, mode)
        if (cache, durability) != ("keep", "flush"):
            raise ValueError(f"cache and durability are of local files; {parse_url(str(path)).name} is a URL")
        return _open_url(str(path), array, dtype, select, storage_options)
    if storage_options:
        raise ValueError(f"storage_options are of URLs; {os.fspath(path)} is a local path")
    kind = kind_of(path)
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{os.fspath(path)} does not exist; create_store makes a new one")
    if kind == "npy":
        if array is not None:
            raise ValueError(f"array={array!r} names an array inside a zarr group; {os.fspath(path)} is one .npy array")
        refuse_to_write(select, mode)
        return _part_of(MemmapStore(path, mode, dtype=dtype, cache=cache, durability=durability), select)
    _refuse_durability(durability, path)
    if kind == "safetensors":
        _refuse_mode(mode)
        return _part_of(SafetensorsStore(path, array, dtype=dtype, cache=cache), select)
    _refuse_cache(cache, path)
    return ZarrStore(path, mode, array=array, dtype=dtype, select=select)


def _open_url(url: str, array: str | None, dtype: torch.dtype | None, select: Any, options: Mapping[str, Any] | None) -> Store:
    where = parse_url(url)
    if kind_of_url(where) == "zarr":
        return ZarrStore(url, array=array, dtype=dtype, select=select, storage_options=options)
    return _part_of(RemoteStore(url, array=array, dtype=dtype, storage_options=options), select)


def _part_of(store: Store, select: Any) -> Store:
    """``store``, or a store of the part of each of its rows that ``select`` picks."""
    try:
        part = selection_of(select, store.row_shape, store.name)
    except BaseException:
        store.close()
        raise
    return store if part.whole else PartStore(store, part)


def create_store(
    path: str | os.PathLike[str],
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    fill: float | complex | bool = 0,
    chunks: int | Sequence[int] | None = None,
    shards: int | Sequence[int] | Literal[False] | None = None,
    compressor: Literal["zstd", "blosc"] | None = None,
    durability: Durability = "flush",
) -> Store:
    """A new .npy or .zarr at ``path``, opened for writing; every row holds ``fill``.

    The disk space of a .npy or an uncompressed .zarr is reserved, so that no later write fails for it. A .npy gets
    its name when it is whole; of two processes that create it at once, one gets a FileExistsError.

    Args:
        path: nothing may be there yet; its folder must.
        shape: ``(rows, *row_shape)``.
        dtype: a torch dtype. bfloat16 and float8 are stored by their bits; a .npy of them is opened with ``dtype=``.
        fill: a value that ``dtype`` has.
        chunks, shards, compressor: of a .zarr, as for ``create_zarr``.
        durability: of a .npy, as for ``open_store``.

    Raises:
        FileExistsError: ``path`` exists. ValueError, TypeError: bad shape, dtype, fill, suffix or option.
        OSError: the disk is too full. In all cases no file is left.
    """
    kind, target = kind_of(path, new=True), Path(path)
    size, value = check_layout(shape, dtype), _fill_value(fill, dtype)
    refuse_existing(target)
    check_durability(durability)
    if kind == "zarr":
        _refuse_durability(durability, target)
        return create_zarr(target, size, dtype, fill=fill, chunks=chunks, shards=shards, compressor=compressor)
    if (chunks, shards, compressor) != (None, None, None):
        raise ValueError(f"chunks, shards and compressor are of .zarr; {target} is a .npy, which has none")
    with beside(target) as temporary:
        write_npy(temporary, size, dtype, value, target)
        publish(temporary, target)
        remove_leftovers(target)
    return MemmapStore(target, "r+", dtype=dtype, durability=durability)


def as_store(obj: Any) -> Store:
    """A store over ``obj``, without a copy of its rows.

    Args:
        obj: a store (returned as it is), a path (opened to read), a NumPy array or CPU tensor (``ArrayStore``), a
            tensor of another device or a CuPy array (``DeviceStore``), or an open ``zarr.Array`` (``ZarrStore``, to read).

    Raises:
        TypeError: another kind of object. Else as the store's constructor, or ``open_store``.
    """
    if isinstance(obj, Store):
        return obj
    if isinstance(obj, str | os.PathLike):
        return open_store(obj)
    if isinstance(obj, torch.Tensor):
        return ArrayStore(obj) if obj.device.type == "cpu" else DeviceStore(obj)
    if isinstance(obj, np.ndarray):
        return ArrayStore(obj)
    if hasattr(obj, "__cuda_array_interface__"):
        return DeviceStore(torch.as_tensor(obj))  # the same memory
    if type(obj).__module__.partition(".")[0] == "zarr":
        return ZarrStore(obj)
    raise TypeError(
        f"a {type(obj).__name__} is not a store; pass a path, a NumPy, torch, CuPy or zarr array, or a Store"
        + ("; numpy.asarray makes an array of a list" if isinstance(obj, list | tuple) else "")
    )


def kind_of(path: str | os.PathLike[str], *, new: bool = False) -> Literal["npy", "zarr", "safetensors"]:
    """Of an existing file, or of a new one to be written.

    Raises:
        TypeError: not a path. ValueError: of no kind that is known, or that can be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path is a str or os.PathLike, not a {type(path).__name__}; as_store takes arrays")
    name = str(os.fspath(path))
    refuse_to_write_url(path)
    suffix = Path(name).suffix.lower()
    if suffix == ".npy":
        return "npy"
    if suffix == ".zarr" or (not new and (suffix == ".zip" or os.path.isdir(name))):
        return "zarr"
    if suffix == ".npz":
        raise ValueError(f"{name}: a .npz is an archive, which cannot be mapped; save its arrays as .npy files")
    if suffix == ".safetensors" or name.lower().endswith(INDEX_SUFFIX):
        if new:
            raise ValueError(f"{name}: a .safetensors is read-only here; write .npy or .zarr")
        return "safetensors"
    if suffix == ".zip":
        raise ValueError(f"{name}: a zip is read-only; write a .zarr directory and pack it")
    raise ValueError(f"{name} has {f'the suffix {suffix}' if suffix else 'no suffix'}, which is of no known kind; {_SUFFIXES}")


def _refuse_durability(durability: Durability, path: str | os.PathLike[str]) -> None:
    """Where it is not of .npy."""
    check_durability(durability)
    if durability != "flush":
        raise ValueError(
            f"durability={durability!r} is of .npy; of {os.fspath(path)} each chunk is replaced whole, and that is all"
        )


def _refuse_mode(mode: Mode) -> None:
    if mode != "r":
        raise ValueError(f"mode is {mode!r}; a .safetensors is read-only ('r'). To change rows, save() them as .npy or .zarr")


def _refuse_cache(cache: Cache, path: str | os.PathLike[str]) -> None:
    if cache != "keep":
        raise ValueError(
            f"cache={cache!r} is of .npy and .safetensors; {os.fspath(path)} is a zarr array, whose reader has no such choice"
        )


def _fill_value(fill: float | complex | bool, dtype: torch.dtype) -> torch.Tensor:
    """``fill`` as a 0-d tensor of ``dtype``.

    Raises:
        ValueError: ``dtype`` has no such value.
    """
    try:
        value = (
            torch.tensor(fill).to(dtype)
            if dtype.itemsize == 1 and dtype.is_floating_point
            else torch.full((), fill, dtype=dtype)
        )
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"fill is {fill!r}, which {dtype} has no value for") from error
    integral = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if value.ndim or (integral and value.item() != fill):
        raise ValueError(f"fill is {fill!r}, which {dtype} has no value for")
    return value
