"""Page-locked host memory of exact size, and page-locked views of files: what a GPU can read over the bus.

Guarantees:
- Memory is unlocked and unmapped when the last tensor or array over it has died, never before, in whatever thread that is.
- A refused lock leaves nothing locked and no error behind for the next CUDA call.
- Without CUDA nothing here initialises it, and memory is ordinary.

Assumes:
- Work on a GPU that still uses the memory is waited for by whoever launched it, before the last tensor dies; or ``wait``
  was asked for, and the work is on the device that was current when the memory was made.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from ._devices import CpuDevice

PIECE = 64 << 30  # bytes a registration; drivers were reported to refuse one of 512 GiB
_TOUCH = 64 << 20  # bytes that one thread touches at a time
_TOUCHERS = 16  # threads; more do not fault pages in faster

_PORTABLE, _MAPPED, _READ_ONLY = 1, 2, 8  # cudaHostRegister* of driver_types.h

_log = logging.getLogger("rowferry")


def pinned_bytes(nbytes: int, *, wait: bool = False) -> torch.Tensor:
    """``nbytes`` of zeroed host memory: uint8, 1-d, page-locked where there is CUDA, ordinary memory elsewhere.

    The size is exact (rounded up to a page), huge pages are asked for, and a forked child does not inherit it:
    touching it there is a segmentation fault, so who hands it out checks for a fork. Any thread. With CUDA the
    current device gets a context; the memory is visible to every device.

    Args:
        nbytes: bytes.
        wait: the device is waited for before the memory goes, as it is for memory that CUDA frees.

    Raises:
        ValueError: ``nbytes`` is negative.
        MemoryError: there is not that much memory, or the driver refused to lock it. Nothing stays behind.
    """
    if nbytes < 0:
        raise ValueError(f"{nbytes} bytes were asked for; a size is 0 or more")
    if nbytes == 0:
        with torch.inference_mode(False):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
    locked = torch.cuda.is_available()
    if locked and nbytes > (free := available_memory()):
        raise MemoryError(
            f"cannot page-lock {nbytes:,} bytes: {free:,} bytes of memory are available; "
            "use a smaller table, a narrower dtype, or a store on disk"
        )
    mapping = _map(nbytes)
    array = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
    if locked:
        _touch(array)  # faulting pages in by many threads is several times faster than letting the driver do it
        lock = Registration(array.ctypes.data, nbytes, _PORTABLE | _MAPPED)
        # The storage holds the array, so the array dies last; the mapping is an argument, so it outlives the lock.
        finalizer = weakref.finalize(array, release, lock, mapping, wait)
        finalizer.atexit = False  # at exit the process gives all back at once, and CUDA may be gone already
    with torch.inference_mode(False):
        return torch.from_numpy(array)


def can_lock() -> bool:
    """Whether there is CUDA to lock pages for. Initialises nothing."""
    return torch.cuda.is_available()


def lock_read_only(pointer: int, nbytes: int) -> Registration:
    """Lock the pages at ``pointer``, the start of a mapping of a file that cannot be written, for GPUs to read.

    Nothing is copied; the file's pages are read in and stay in the page cache. The caller calls ``release`` before the
    mapping goes away.

    Raises:
        MemoryError: the driver refused (a file larger than memory, no read-only registration); nothing is locked.
    """
    return Registration(pointer, nbytes, _PORTABLE | _MAPPED | _READ_ONLY)


def available_memory() -> int:
    """Bytes that this process could still take, its container's limit counted: the page cache can be given up for them."""
    free = CpuDevice().free_bytes()
    group = Path("/sys/fs/cgroup")  # inside a container its own group, elsewhere the root, which has no limit
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    if limit == "max":
        return free
    return max(min(free, int(limit) - used + int(cached["active_file"]) + int(cached["inactive_file"])), 0)


@final
class Registration:
    """A range of host memory that is page-locked until ``release``, in pieces of at most ``PIECE`` bytes.

    Raises:
        MemoryError: the driver refused; nothing is locked.
    """

    def __init__(self, pointer: int, nbytes: int, flags: int) -> None:
        self._device = torch.cuda.current_device()
        self._owner = os.getpid()
        self._locked: list[int] = []
        for start in range(0, nbytes, PIECE):
            size = min(PIECE, nbytes - start)
            code = int(_cudart().cudaHostRegister(pointer + start, size, flags))
            if code:
                self.release()
                reason = _cudart().cudaGetErrorString(_cudart().cudaError(code))
                _clear_error(self._device)
                raise MemoryError(
                    f"the CUDA driver refused to page-lock {size:,} of {nbytes:,} bytes (error {code}, {reason}); raise "
                    f"the limit of locked memory ('ulimit -l unlimited'; it is {_lock_limit()}), or use a smaller table"
                )
            self._locked.append(pointer + start)

    def release(self, *, wait: bool = False) -> None:
        """Unlock, once the device is idle where that is to be waited for; idempotent, any thread. In a forked child, which
        has neither memory nor CUDA, it does nothing."""
        locked, self._locked = self._locked, []
        if not locked or os.getpid() != self._owner:
            return
        with torch.cuda.device(self._device):  # else a thread that set no device would open a context on GPU 0
            if wait and not torch.cuda.is_current_stream_capturing():  # waiting would break the capture
                torch.cuda.synchronize(self._device)
            for pointer in reversed(locked):
                code = int(_cudart().cudaHostUnregister(pointer))
                if code:
                    _log.error("page-locked memory at %#x could not be unlocked (CUDA error %d)", pointer, code)
                    _clear_error(self._device)


def _cudart() -> Any:
    """The CUDA runtime that torch itself uses, where torch has a binding."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]


def _map(nbytes: int) -> mmap.mmap:
    """A private anonymous mapping that a forked child does not get."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(
            f"the system has no room for {nbytes:,} bytes; use a smaller table, a narrower dtype, or a store on disk"
        ) from error
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # advice: a kernel without transparent huge pages refuses it
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _touch(array: NDArray[np.uint8]) -> None:
    """Fault every page in. NumPy releases the GIL in each assignment; the threads end before this returns."""

    def touch(start: int) -> None:
        array[start : start + _TOUCH : mmap.PAGESIZE] = 0

    starts = range(0, array.size, _TOUCH)
    threads = min(len(starts), _TOUCHERS, len(os.sched_getaffinity(0)))
    if threads < 2:
        for start in starts:
            touch(start)
        return
    with ThreadPoolExecutor(threads, "rowferry-touch") as pool:
        list(pool.map(touch, starts))


def release(lock: Registration, mapping: Any, wait: bool = False) -> None:
    """What a dead tensor leaves: unlock, and only then let go of the mapping, which unmaps it."""
    lock.release(wait=wait)
    del mapping


def _clear_error(device: int) -> None:
    """Take the error that a refused call left for whoever launches a kernel next.

    torch gives no cudaGetLastError; a launch collects it and raises. The second launch raises only where the device
    is really broken, and then nothing should go on.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=torch.device("cuda", device))
    torch.zeros(1, device=torch.device("cuda", device))


def _lock_limit() -> str:
    import resource  # a Unix module, wanted for this message only

    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
