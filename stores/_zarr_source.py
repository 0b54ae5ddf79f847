"""Where the array of a ``ZarrStore`` is: on a disk, behind a URL, or in any store of zarr that the user has open."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar, final

import zarr
from zarr.storage import LocalStore, ObjectStore, ZipStore

from . import _zarr_open
from ._files import Mode
from ._remote import TRIES, RemoteObjects, was_cut
from ._url import is_url, parse_url, refuse_to_write_url

_Result = TypeVar("_Result")


@final
class Source:
    """The array, opened by a path or URL (then ``close`` closes it), or the user's own.

    Args:
        source, mode, array, options: as ``ZarrStore`` explains them.

    Attributes:
        array: as it was opened.
        root: the store's directory; None where it is none.
        directory: of the array in it.
        objects: those behind a URL, else None.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | zarr.Array[Any],
        mode: Mode,
        array: str | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        self.objects: RemoteObjects | None = None
        self._owned = not isinstance(source, zarr.Array)
        if options and not is_url(source):
            raise ValueError("storage_options are of URLs; an open zarr.Array or a local path was given")
        if isinstance(source, zarr.Array):
            if array is not None:
                raise ValueError(f"array={array!r} names an array inside a path; an open zarr.Array was given")
            if mode == "r+" and source.read_only:
                raise PermissionError(f"{source.store_path} was opened read-only; open it with mode='r+' to write")
            self.array = source
        elif is_url(source):
            refuse_to_write_url(source, mode)
            where = parse_url(source)
            self.objects = RemoteObjects(where, options, folder=True)
            objects = ObjectStore(self.objects.store, read_only=True)
            self.array = self.told(lambda: _zarr_open.open_url(objects, where.name, array))
        else:
            self.array = _zarr_open.open_path(Path(source), mode, array)
        store: Any = self.array.store
        self.root = Path(store.root) if isinstance(store, LocalStore) else None
        self.directory = self.root / self.array.path if self.root else None

    @property
    def name(self) -> str:
        """What errors and logs call the array."""
        store: Any = self.array.store
        inner = f", array {self.array.path!r}" if self.array.path else ""
        if self.objects is not None:
            return f"{self.objects.name}{inner}"
        return f"{store.root if self.root else store.path if isinstance(store, ZipStore) else store}{inner}"

    @property
    def identity(self) -> Hashable:
        """As of ``Store``."""
        store, path = self.array.store, self.array.path
        if self.objects is not None:
            return ("zarr", self.objects.name, path)
        if self.directory is not None:
            return ("zarr", os.path.realpath(self.directory))
        if isinstance(store, ZipStore):
            return ("zarr", os.path.realpath(store.path), path)
        # zarr makes a new MemoryStore object over the same dict for each mode, so the dict is what identifies it.
        return ("zarr", id(getattr(store, "_store_dict", store)), path)

    @property
    def may_be_resized(self) -> bool:
        """Its shape must be asked for again, and no file's time tells whether it changed."""
        return self.objects is None and self.directory is None and not isinstance(self.array.store, ZipStore)

    def told(self, call: Callable[[], _Result]) -> _Result:
        """``call()``, which only reads where it may be made again; errors behind a URL are told without anything secret."""
        if self.objects is None:
            return call()
        for left in reversed(range(TRIES)):
            try:
                return call()
            except Exception as error:
                if not (left and was_cut(error)):
                    failed = self.objects.plain(error, self.objects.name)
                    break
        raise failed  # here, where it does not remember the other

    def close(self) -> None:
        """Close the store, unless it is the user's own."""
        if self._owned:
            self.array.store.close()
