"""The record of a commit of files that change together: a small JSON file beside the first of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _redo, _undo
from ._files import beside, sync_folder

SUFFIX = ".commit"
_FORMAT = "rowferry commit 1"


def beside_file(path: Path, suffix: str) -> Path:
    """``x.npy`` and ``.undo`` -> ``x.npy.undo``, in the folder of the file itself, whatever link led to it."""
    real = path.resolve()
    return real.with_name(real.name + suffix)


@dataclass(frozen=True)
class Record:
    """A commit.

    Attributes:
        generation: its number, counted up.
        stores: paths of the data files, relative to the record's folder.
        state: what the pipeline's ``flush`` saved with it, as JSON holds it; None when a store was flushed alone.
    """

    generation: int
    stores: tuple[str, ...]
    state: Any


def remove_leftovers(path: Path) -> None:
    """Remove what an earlier file of this name left beside it."""
    for suffix in (_undo.SUFFIX, _redo.SUFFIX):
        beside_file(path, suffix).unlink(missing_ok=True)


def read_record(path: Path) -> Record | None:
    """The commit record at ``path``; None if there is none.

    Raises:
        ValueError: it is no such record.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(text)
        if fields["format"] != _FORMAT:
            raise ValueError(f"it is of format {fields['format']!r}")
        return Record(int(fields["generation"]), tuple(map(str, fields["stores"])), fields["state"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no commit record of this version: {error!r}") from error


def home_of(path: Path) -> tuple[Path, Record] | None:
    """The commit record that a file's undo file leads to, if it names the file."""
    undo = beside_file(path, _undo.SUFFIX)
    header = _undo.read_header(undo) if undo.exists() else None
    if header is None or header.inode != path.stat().st_ino:  # the file was replaced
        return None
    place = Path(os.path.normpath(undo.parent / header.record))
    record = read_record(place)
    if record is None or path not in [Path(os.path.normpath(place.parent / name)) for name in record.stores]:
        return None
    return place, record


def write_record(path: Path, record: Record) -> None:
    """Replace the record at ``path``, whole and durable.

    Raises:
        OSError: the disk is full, or failed; whether the record was replaced, ``read_record`` tells.
    """
    fields = {"format": _FORMAT, "generation": record.generation, "stores": record.stores, "state": record.state}
    text = json.dumps(fields, indent=1).encode()
    with beside(path) as temporary:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(text)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_folder(path.parent)
