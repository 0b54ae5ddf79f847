"""All rows of a store into a new file that takes its place whole."""

from __future__ import annotations

import os
from pathlib import Path

from ._contract import Store
from ._files import beside, refuse_live_writer, replace
from ._open import create_store, kind_of, open_store
from ._zarr_lock import DirectoryLock


def save(store: Store, path: str | os.PathLike[str]) -> None:
    """See ``Store.save``.

    Raises:
        ValueError: the suffix is neither .npy nor .zarr, or a zarr group is there. BlockingIOError: a store is open
            for writing on what is there. OSError: the disk is too full. ``path`` is as before then, and nothing is left.
    """
    kind_of(path, new=True)  # refuses what cannot be written
    target = Path(path)
    if os.path.lexists(target):
        _refuse_if_needed(target)
    try:
        with beside(target) as temporary:
            with create_store(temporary, store.shape, store.dtype) as copy:
                copy.copy_from(store)
                copy.flush(sync=True)
            replace(temporary, target)
    except BaseException as error:
        error.add_note(f"while {store.name} was saved to {target}")
        raise


def _refuse_if_needed(target: Path) -> None:
    """Raise where replacing what is there would lose more than one array that nobody writes."""
    if target.suffix == ".zarr" and target.is_dir():
        open_store(target).close()  # raises when it is no array, but a group with others in it
        DirectoryLock(target).close()
    elif target.is_file():
        refuse_live_writer(target)
    else:
        raise FileExistsError(f"{target} is neither a file nor a .zarr directory; remove it, or choose another path")
