"""Reads through io_uring: right bytes, errors, and nothing under way after a call, however it ends."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowferry.stores import _ring

pytestmark = pytest.mark.skipif(not _ring.available(), reason="this system does not let this process use io_uring")

SIZE = 3 << 20
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("ring") / "bytes"
    path.write_bytes(CONTENT.tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def read(fd: int, offsets: list[int], lengths: list[int]) -> list[bytes]:
    """The ranges, read one after the other into one buffer."""
    targets = np.cumsum([0, *lengths])
    out = np.zeros(int(targets[-1]), np.uint8)
    _ring.read(fd, np.array(offsets), targets[:-1], np.array(lengths), out.data)
    return [out[start : start + length].tobytes() for start, length in zip(targets, lengths, strict=False)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SIZE - 5000), st.integers(1, 5000)), min_size=1, max_size=700))
def test_ranges_of_any_length_and_place_are_read_right(fd: int, ranges: list[tuple[int, int]]) -> None:
    offsets, lengths = [start for start, _ in ranges], [length for _, length in ranges]
    assert read(fd, offsets, lengths) == [CONTENT[a : a + n].tobytes() for a, n in ranges]


def test_more_ranges_than_can_be_in_flight_are_read_in_turn(fd: int) -> None:
    offsets = np.random.default_rng(1).integers(0, SIZE - 8, 3 * _ring.DEPTH + 7).tolist()
    found = read(fd, offsets, [8] * len(offsets))
    assert found == [CONTENT[each : each + 8].tobytes() for each in offsets]


def test_a_long_range_is_read_in_pieces(fd: int) -> None:
    assert read(fd, [5, 0], [SIZE - 7, 3]) == [CONTENT[5:-2].tobytes(), CONTENT[:3].tobytes()]


def test_the_end_of_the_file_is_an_error_that_says_where(fd: int) -> None:
    with pytest.raises(EOFError, match=f"{SIZE:,}"):
        read(fd, [0, SIZE - 10], [10, 20])
    assert read(fd, [7], [3]) == [CONTENT[7:10].tobytes()]


def test_what_the_system_refuses_is_an_oserror_with_its_number(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="directory") as caught:
            read(folder, [0] * 300, [10] * 300)
    finally:
        os.close(folder)
    assert caught.value.errno == errno.EISDIR


def test_an_interrupt_leaves_no_read_under_way(fd: int) -> None:
    source, sink = os.pipe()
    calls = []

    def on_alarm(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        if len(calls) == 1:  # while the read waits for bytes that are not there
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            raise KeyboardInterrupt
        os.write(sink, b"late")  # while the interrupted call waits for its read to end

    before = signal.signal(signal.SIGALRM, on_alarm)
    out = np.zeros(4, np.uint8)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            _ring.read(source, np.array([0]), np.array([0]), np.array([4]), out.data)
    finally:
        signal.signal(signal.SIGALRM, before)
        os.close(source)
        os.close(sink)
    assert len(calls) == 2
    assert out.tobytes() == b"late"
    assert read(fd, [9], [4]) == [CONTENT[9:13].tobytes()]


def test_a_forked_child_reads_through_a_ring_of_its_own(fd: int) -> None:
    assert read(fd, [1], [2]) == [CONTENT[1:3].tobytes()]
    child = os.fork()
    if not child:
        ok = read(fd, list(range(500)), [3] * 500)[499] == CONTENT[499:502].tobytes()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(fd, [4], [5]) == [CONTENT[4:9].tobytes()]
