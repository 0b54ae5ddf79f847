"""A file that is mapped read-only, page-locked where it lies in the page cache, so that a GPU reads it without a copy.

Guarantees:
- Nothing is copied and the file cannot be changed. All stores and pipelines of a process over one file share one lock;
  other processes share the pages.
- Pages are unlocked and unmapped when the last tensor over them has died. A forked child does not inherit the mapping.
- A refused lock leaves the file as it was.

Assumes:
- Work on a GPU that still reads the pages is waited for by whoever launched it, before the last tensor dies.
- Nobody truncates the file meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from typing import Any, final

import numpy as np
import torch

from ._npy import NpyHeader
from ._pinning import available_memory, can_lock, lock_read_only, release
from ._views import tensor_over

MOSTLY = 0.9  # share of a file in memory from which on locking it costs little: the rest is read from the disk
SMALL = 256 << 20  # bytes; a file of that size is read in an instant
SHARE = 0.5  # of the memory available: locked pages are lost to everybody else

_locked: weakref.WeakValueDictionary[tuple[int, int, int], np.ndarray[Any, Any]] = weakref.WeakValueDictionary()
_locking = threading.Lock()  # guards _locked, and that a file is locked once


@final
class PageCache:
    """The pages of one open .npy file in C order and native byte order.

    Args:
        fd: open for reading as long as this is used.
        header: where the rows lie in the file.
        name: what errors call it.
    """

    def __init__(self, fd: int, header: NpyHeader, name: str) -> None:
        self.nbytes = header.offset + header.nbytes
        self.name = name
        self._header = header
        self._fd = fd

    def why_not(self, *, read_before: bool) -> str:
        """What speaks against locking the file now; empty when nothing does. Reads nothing from the disk.

        Args:
            read_before: the caller has read the file once, so what memory can keep of it is in memory, whatever the
                kernel tells (it tells only those who may write the file).
        """
        if not can_lock():
            return "torch sees no CUDA device"
        if self._key() in _locked:
            return ""
        free = available_memory() - sum(array.nbytes for array in _locked.values())  # which the kernel counts as available
        if self.nbytes > SHARE * free:
            return f"its {self.nbytes:,} bytes are more than {SHARE:.0%} of the {free:,} bytes of memory available"
        share = self.resident()
        if self.nbytes <= SMALL or (share is None and read_before) or (share is not None and share >= MOSTLY):
            return ""
        known = "an unknown share" if share is None else f"{share:.0%}"
        return f"{known} of it is in memory; it is looked at again at the next epoch"

    def resident(self) -> float | None:
        """Share of the pages that are in memory; None where the kernel does not tell this user."""
        owner = os.fstat(self._fd).st_uid
        if os.geteuid() not in (0, owner) and not os.access(f"/proc/self/fd/{self._fd}", os.W_OK):
            return None  # mincore would call every page resident
        mapping = mmap.mmap(self._fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        array = np.frombuffer(mapping, np.uint8)
        pages = np.zeros(-(-self.nbytes // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.mincore(
            ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(self.nbytes), ctypes.c_void_p(pages.ctypes.data)
        )
        if result:
            raise OSError(ctypes.get_errno(), f"mincore failed for {self.name}")
        return float((pages & 1).mean())

    def lock(self) -> torch.Tensor:
        """The rows, page-locked: ``(n, *row_shape)``, no copy. Reads what of the file is not in memory; any thread.

        Nobody may write to the tensor: that is a segmentation fault.

        Raises:
            MemoryError: the driver refused; the message says why. RuntimeError: there is no CUDA device.
        """
        if not can_lock():
            raise RuntimeError(f"{self.name} can't be page-locked: torch sees no CUDA device")
        with _locking:
            array = _locked.get(self._key())
            if array is None:
                array = _locked[self._key()] = self._lock()
        header = self._header
        rows = array[header.offset :].view(header.stored).reshape(header.shape)
        return tensor_over(rows).view(header.dtype)

    def _key(self) -> tuple[int, int, int]:
        seen = os.fstat(self._fd)
        return seen.st_dev, seen.st_ino, self.nbytes

    def _lock(self) -> np.ndarray[Any, Any]:
        mapping = mmap.mmap(self._fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        mapping.madvise(mmap.MADV_DONTFORK)
        array = np.frombuffer(mapping, np.uint8)
        registration = lock_read_only(array.ctypes.data, self.nbytes)
        # The tensor holds the array, so the array dies last; the mapping is an argument, so it outlives the lock.
        weakref.finalize(array, release, registration, mapping).atexit = False
        return array
