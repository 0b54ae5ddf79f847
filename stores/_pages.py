"""Files mapped side by side in one span of address space, and their pages asked for ahead of use.

One NumPy call then reads rows of thousands of files without the GIL, and one system call has the disk fetch all pages
that it will touch, as deep as its queue is.

Guarantees:
- Memory is read-only. Nothing of it counts as resident for longer than ``forget`` is called now and then.
- A mapped file may be replaced by renaming another over it: what is mapped stays the old one.

Assumes:
- No mapped file is made shorter while it is mapped; that would kill the process, as with any mapping.
- Linux. ``process_madvise`` (5.10; without privileges 6.13) makes asking for pages one call; else it is one a run of pages.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import weakref
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger("rowferry")

PAGE = mmap.PAGESIZE
GAP = 3  # pages between two runs that are fetched with them: a disk reads them in the time of one more request
LONGEST = 32  # pages asked for in one piece: of a longer one Linux fetches what the disk takes at once, and leaves out the rest
SAMPLE = 32  # runs of pages looked at to tell whether all are in memory; asking for fewer costs as little as looking

_CLOSE = 8  # pages that ranges may be spread over for each of them, for counts to be cheaper than sorting

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mincore = ctypes.PyDLL(None).mincore  # keeps the GIL, for a microsecond: giving it up beside a training loop takes longer
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value
_PROCESS_MADVISE = 440  # the same number on every architecture
_MOST_RUNS = 1024  # of one call: UIO_MAXIOV
_RUN = np.dtype([("address", np.uint64), ("nbytes", np.uint64)])  # struct iovec


@final
class Arena:
    """Room for ``slots`` files of at most ``stride`` bytes each: file k is at ``memory[k * stride:]``.

    Reading a byte that no file was placed at kills the process. Any thread; a slot is placed and cleared by one at a time.

    Attributes:
        memory: all of it, one byte an element. The arena must outlive its use.
        stride: as given; whole pages.

    Raises:
        OSError: the process may not have that much address space.
    """

    def __init__(self, slots: int, stride: int) -> None:
        if stride % PAGE:
            raise ValueError(f"stride is {stride}; it must be whole pages of {PAGE} bytes")
        self.stride = stride
        self._nbytes = slots * stride
        self._used = bytearray(slots)
        self._address = _map(None, self._nbytes, _PROT_NONE, _NOTHING, -1)
        self._unmap = weakref.finalize(self, _libc.munmap, self._address, self._nbytes)
        self._unmap.atexit = False  # threads may be reading still, and the process is at its end
        self.memory: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * self._nbytes).from_address(self._address))
        self._process: int | None = os.pidfd_open(os.getpid()) if hasattr(os, "pidfd_open") else None
        if self._process is not None:
            weakref.finalize(self, os.close, self._process).atexit = False

    def place(self, slot: int, fd: int, nbytes: int) -> None:
        """Map the first ``nbytes`` bytes (at least one) of an open file, which may be closed afterwards."""
        self._used[slot] = 1
        start = self._address + slot * self.stride
        _map(start, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
        _libc.madvise(start, nbytes, mmap.MADV_RANDOM)  # what is needed is asked for; a fault should not read more

    def clear(self, slot: int) -> None:
        """Take a file out, if there is one."""
        if not self._used[slot]:
            return
        _map(self._address + slot * self.stride, self.stride, _PROT_NONE, _NOTHING | _MAP_FIXED, -1)
        self._used[slot] = 0

    def forget(self) -> None:
        """Nothing of the files counts as resident any more; the page cache keeps them."""
        _libc.madvise(self._address, self._nbytes, mmap.MADV_DONTNEED)

    def will_need(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> bool:
        """Have the disk fetch the pages of these byte ranges of ``memory``, unless they seem to be in memory already.

        Returns when all are on their way, which for a full disk queue is when most have come: whether they were asked for.
        """
        if starts.size > SAMPLE and int((stops - starts).sum()) <= starts.size * PAGE and self._seem_resident(starts // PAGE):
            return False  # so many small ranges are cheaper to sample than to bring into order
        first, pages = page_runs(starts, stops, GAP)
        first, pages = cut_runs(first, pages, LONGEST)  # before the sample: a long run counts by its length in it
        if first.size > SAMPLE and self._seem_resident(first):
            return False
        runs = np.empty(first.size, _RUN)
        runs["address"] = self._address + first * PAGE
        runs["nbytes"] = pages * PAGE
        if self._process is None or not self._advise_all(runs):
            for address, nbytes in runs.tolist():
                _libc.madvise(address, nbytes, mmap.MADV_WILLNEED)
        return True

    def _advise_all(self, runs: NDArray[Any]) -> bool:
        """Whether the system lets one call advise many runs."""
        for start in range(0, runs.size, _MOST_RUNS):
            some = runs[start : start + _MOST_RUNS]
            pointer = ctypes.c_void_p(some.ctypes.data)
            done = _libc.syscall(_PROCESS_MADVISE, self._process, pointer, ctypes.c_size_t(some.size), mmap.MADV_WILLNEED, 0)
            if done < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EINVAL):
                _log.info("process_madvise is refused (%s); pages are asked for run by run", os.strerror(ctypes.get_errno()))
                self._process = None
                return False
        return True

    def _seem_resident(self, first: NDArray[np.int64]) -> bool:
        found = ctypes.c_uint8()
        for page in first[:: -(-first.size // SAMPLE)].tolist():
            if _mincore(self._address + page * PAGE, PAGE, ctypes.byref(found)) or not found.value & 1:
                return False
        return True


def page_runs(starts: NDArray[np.int64], stops: NDArray[np.int64], gap: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pages that byte ranges (none empty) lie in, as ascending runs without overlap: first page, number of pages.

    Runs with at most ``gap`` pages between them become one. Pure.
    """
    first, last = starts // PAGE, (stops - 1) // PAGE
    if first.size and int(last.max()) - int(first.min()) < _CLOSE * first.size:
        return _marked_runs(first, last, gap)
    if not bool(np.all(first[1:] >= first[:-1])):
        order = np.argsort(first)
        first, last = first[order], last[order]
    reach = np.maximum.accumulate(last)
    new = np.concatenate(([True], first[1:] > reach[:-1] + 1 + gap)) if first.size else np.empty(0, bool)
    begins = np.flatnonzero(new)
    ends = reach[np.append(begins[1:], first.size) - 1] if first.size else reach
    return first[begins], ends - first[begins] + 1


def _marked_runs(first: NDArray[np.int64], last: NDArray[np.int64], gap: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``page_runs`` of pages that are close together, by a count of ranges for each page: no sorting."""
    low = int(first.min())
    size = int(last.max()) - low + 2
    open_ = np.cumsum(np.bincount(first - low, minlength=size) - np.bincount(last - low + 1, minlength=size))
    edges = np.flatnonzero(np.diff(open_ > 0, prepend=False))  # a run begins at every other one, and ends at the next
    begins, ends = edges[::2], edges[1::2]
    apart = begins[1:] - ends[:-1] > gap
    begins, ends = begins[np.concatenate(([True], apart))], ends[np.concatenate((apart, [True]))]
    return begins + low, ends - begins


def cut_runs(first: NDArray[np.int64], pages: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same pages as runs of at most ``most``, in the same order. Pure."""
    pieces = -(-pages // most)
    inside = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.repeat(first, pieces) + inside * most, np.minimum(np.repeat(pages, pieces) - inside * most, most)


def resident_file_bytes() -> int:
    """Bytes of mapped files, and of memory shared with others, that count as this process's memory now."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[2]) * PAGE


def whole_pages(nbytes: int, unit: int = 1) -> int:
    """The least number of bytes from ``nbytes`` on that is whole pages, and whole ``unit`` bytes."""
    step = math.lcm(PAGE, unit)
    return -(-nbytes // step) * step


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _FAILED or found is None:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: {nbytes:,} bytes of address space could not be mapped")
    return int(found)
