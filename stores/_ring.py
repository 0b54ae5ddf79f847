"""Many reads in flight from one thread: io_uring, driven through ctypes and NumPy.

Guarantees:
- A call holds the GIL to list a few hundred requests at a time, never while the kernel works on them.
- When ``read`` returns or raises, no request is under way: the kernel writes into no memory of the caller any more.
- A ring belongs to one thread at a time, and never to a forked child.

Assumes:
- Linux 5.6 or later and permission to use io_uring; ``available`` tells. Containers often forbid it.

No torch: programs that only recover files, and the tests that kill them, use this module without it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

# Requests in flight, and completions to wait for before more are listed. Devices queue some 256, and 128 to 8,192 read
# random rows equally fast. But each list needs the GIL, for which a thread may wait 5 ms beside a loop that launches
# kernels: with lists of 64 such a loop ran at 0.6 of its speed, and rows came at 0.3 of theirs.
DEPTH, _WAIT = 4096, 2048
_MOST_BYTES = 1 << 18  # of a request; longer ones are cut, so that wide rows are read deep as well

_SETUP, _ENTER = 425, 426  # numbers of the system calls, the same on every architecture of Linux but alpha
_OP_READ, _GET_EVENTS = 22, 1
_NEEDED = 1 << 0 | 1 << 1 | 1 << 3  # features: one mapping for both queues, no completion lost, reads (since 5.6)
_SQE_OFFSET = 0x10000000
_MAP_POPULATE = 0x8000  # of mman.h on Linux
_WORD = 0xFFFFFFFF  # counters of the queues run over at 32 bits

_libc = ctypes.CDLL(None, use_errno=True)
_SQE = np.dtype(
    {  # struct io_uring_sqe of linux/io_uring.h, as far as reads need it
        "names": ["op", "fd", "offset", "address", "length", "tag"],
        "formats": ["u1", "i4", "u8", "u8", "u4", "u8"],
        "offsets": [0, 4, 8, 16, 24, 32],
        "itemsize": 64,
    }
)
_CQE = np.dtype([("tag", "u8"), ("result", "i4"), ("flags", "u4")])


class _Params(ctypes.Structure):
    """``struct io_uring_params`` of linux/io_uring.h."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("sq_entries", "cq_entries", "flags", "cpu", "idle", "features", "wq")),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq", ctypes.c_uint32 * 10),  # offsets: head, tail, ring_mask, ring_entries, flags, dropped, array
        ("cq", ctypes.c_uint32 * 10),  # offsets: head, tail, ring_mask, ring_entries, overflow, cqes
    )


def read(fd: int, offsets: NDArray[np.int64], targets: NDArray[np.int64], lengths: NDArray[np.int64], into: memoryview) -> None:
    """Read byte ranges of a file straight into a buffer, all of them in flight at once as far as the ring goes.

    Args:
        fd: a file open for reading.
        offsets, lengths: ``(k,)``: which bytes of the file. Ranges may overlap.
        targets: ``(k,)``: where in ``into`` each range goes. Those must not overlap.
        into: writable bytes.

    Raises:
        OSError: what the file system said, EIO among it; ``EOFError``: the file ends before a range does.
        Bytes of ``into`` are then undefined.
    """
    offsets, targets, lengths = _cut(offsets, targets, lengths)
    base = np.frombuffer(into, np.uint8).ctypes.data
    ring = _take()
    try:
        while len(offsets):
            results = ring.submit(fd, offsets, base + targets, lengths)
            failed = results < 0
            if failed.any():
                code = -int(results[failed][0])
                raise OSError(code, os.strerror(code))
            if not results.all():
                raise EOFError(f"the file ends at or before byte {int(offsets[results == 0][0]):,}")
            short = results < lengths  # rare: a read that was cut short goes on where it stopped
            offsets, targets, lengths = (offsets + results)[short], (targets + results)[short], (lengths - results)[short]
    finally:
        if ring.in_flight:  # a second interrupt came while the first one's reads were waited for
            _lost.append((ring, into))
        else:
            _idle.append(ring)


@functools.cache
def available() -> bool:
    """Whether this system lets this process use io_uring."""
    try:
        _idle.append(_Ring())
    except OSError:
        return False
    return True


def _cut(
    offsets: NDArray[np.int64], targets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The same ranges in pieces of at most ``_MOST_BYTES``, none empty."""
    pieces = -(-lengths // _MOST_BYTES)
    if int(pieces.max(initial=0)) <= 1 and int(pieces.min(initial=1)) == 1:
        return offsets, targets, lengths
    which = np.repeat(np.arange(len(lengths)), pieces)
    first = np.cumsum(pieces) - pieces
    start = (np.arange(len(which)) - first[which]) * _MOST_BYTES
    return offsets[which] + start, targets[which] + start, np.minimum(lengths[which] - start, _MOST_BYTES)


_idle: list[_Ring] = []  # rings that no thread uses; list.append and list.pop are atomic
_lost: list[tuple[_Ring, memoryview]] = []  # rings given up with reads under way, and the memory these go to: kept for good


def _take() -> _Ring:
    while _idle:
        ring = _idle.pop()
        if ring.pid == os.getpid():
            return ring
    return _Ring()


@final
class _Ring:
    """One submission and one completion queue, shared with the kernel.

    Raises:
        OSError: forbidden here (EPERM), switched off or too old (ENOSYS).
    """

    def __init__(self) -> None:
        params = _Params()
        fd = _libc.syscall(ctypes.c_long(_SETUP), ctypes.c_uint(DEPTH), ctypes.byref(params))
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        try:
            if params.features & _NEEDED != _NEEDED:
                raise OSError(errno.ENOSYS, "io_uring of this kernel is too old")
            size = max(params.sq[6] + 4 * params.sq_entries, params.cq[5] + _CQE.itemsize * params.cq_entries)
            rings, entries = _map(fd, size, 0), _map(fd, _SQE.itemsize * params.sq_entries, _SQE_OFFSET)
        except BaseException:
            os.close(fd)
            raise
        self.pid = os.getpid()
        self._fd = fd
        words = np.frombuffer(rings, np.uint32, size // 4)
        self._size = params.sq_entries
        self._sq_head, self._sq_tail = (words[params.sq[each] // 4 :][:1] for each in (0, 1))
        self._cq_head, self._cq_tail = (words[params.cq[each] // 4 :][:1] for each in (0, 1))
        words[params.sq[6] // 4 :][: self._size] = np.arange(self._size)  # entry i is always at place i
        self._sqes = np.frombuffer(entries, _SQE, self._size)
        self._cqes = np.frombuffer(rings, _CQE, params.cq_entries, params.cq[5])

    @property
    def in_flight(self) -> int:
        """Requests that the kernel has and that were not reaped. From the kernel's counters: right after any interrupt."""
        return (int(self._sq_head[0]) - int(self._cq_head[0])) & _WORD

    @property
    def _waiting(self) -> int:
        """Requests that are listed and that the kernel has not taken."""
        return (int(self._sq_tail[0]) - int(self._sq_head[0])) & _WORD

    def submit(
        self, fd: int, offsets: NDArray[np.int64], addresses: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """What each read returned: bytes, or minus an error number. Returns, or raises, when none is under way."""
        results = np.empty(len(offsets), np.int64)
        listed = 0
        try:
            while listed < len(offsets) or self.in_flight or self._waiting:
                more = min(self._size - self.in_flight - self._waiting, len(offsets) - listed)
                if more:
                    self._list(fd, offsets, addresses, lengths, listed, listed + more)
                    listed += more
                self._enter(self._waiting, min(_WAIT, self.in_flight + self._waiting))
                self._reap(results)
        except BaseException:
            self._sq_tail[0] = self._sq_head[0]  # what the kernel has not taken is taken back; the rest is waited for
            while self.in_flight:
                self._enter(0, self.in_flight)
                self._reap(results)
            raise
        return results

    def _list(self, fd: int, offsets: Any, addresses: Any, lengths: Any, start: int, stop: int) -> None:
        tail = int(self._sq_tail[0])
        at = (tail + np.arange(stop - start)) % self._size
        entries = np.zeros(stop - start, _SQE)
        entries["op"], entries["fd"] = _OP_READ, fd
        entries["offset"], entries["address"], entries["length"] = (each[start:stop] for each in (offsets, addresses, lengths))
        entries["tag"] = np.arange(start, stop)
        self._sqes[at] = entries
        self._sq_tail[0] = (tail + stop - start) & _WORD

    def _enter(self, submit: int, wait: int) -> None:
        """Hand ``submit`` listed entries over and wait for ``wait`` completions, or less when a signal comes."""
        arguments = (ctypes.c_uint(self._fd), ctypes.c_uint(submit), ctypes.c_uint(wait), ctypes.c_uint(_GET_EVENTS))
        if _libc.syscall(ctypes.c_long(_ENTER), *arguments, ctypes.c_void_p(None), ctypes.c_size_t(0)) >= 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINTR and not (code in (errno.EAGAIN, errno.EBUSY) and self.in_flight):
            raise OSError(code, os.strerror(code))

    def _reap(self, results: NDArray[np.int64]) -> None:
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        done = self._cqes[(head + np.arange((tail - head) & _WORD)) % len(self._cqes)]
        results[done["tag"]] = done["result"]
        self._cq_head[0] = tail

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


def _map(fd: int, size: int, offset: int) -> mmap.mmap:
    return mmap.mmap(fd, size, mmap.MAP_SHARED | _MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
