"""Rows that follow one another in chunk files: read by one call a run, from memory or the disk, and asked for ahead of use."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowferry.stores import ZarrStore, _pages, _zarr_files, _zarr_runs
from rowferry.stores._zarr_files import ChunkFiles, Folder
from rowferry.stores._zarr_layout import raw_layout
from rowferry.stores._zarr_runs import RunReader

ROWS, WIDTH, CHUNK = 40, 6, 4
DATA = np.arange(1, ROWS * WIDTH + 1, dtype="f4").reshape(ROWS, WIDTH)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a row and more are read by a call each, and few files are open."""
    monkeypatch.setattr(_zarr_runs, "LEAST_BYTES", 1)
    monkeypatch.setattr(_zarr_runs, "AHEAD", 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return put(tmp_path / "a.zarr")


def put(path: Path, rows: int = ROWS) -> Path:
    array = zarr.create_array(path, shape=(ROWS, WIDTH), dtype="f4", chunks=(CHUNK, WIDTH), compressors=None, fill_value=7)
    array[:rows] = DATA[:rows]
    return path


def readers_of(path: Path, *, fill: bool = True) -> RunReader:
    layout = raw_layout(zarr.open_array(path))
    assert layout is not None
    row = np.full(WIDTH, 7, "f4").view(np.uint8) if fill else None
    return RunReader(str(path), layout, lambda chunk: f"c/{chunk}/0", row, "the array")


def read(reader: RunReader, rows: Any) -> NDArray[np.float32] | None:
    """The rows; None where the reader leaves them to another."""
    found = np.empty((len(rows), WIDTH), "f4")
    return found if reader.gather(np.asarray(rows, np.int64), found.reshape(-1).view(np.uint8)) else None


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def in_memory(share: float) -> Callable[[int, Any, int], int]:
    """What stands for a page cache that has this share of what is asked for, its first bytes."""

    def read_now(fd: int, view: Any, offset: int) -> int:
        return os.preadv(fd, [memoryview(view)[: int(len(view) * share)]], offset)

    return read_now


@given(
    rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=60)
    | st.tuples(st.integers(0, 39), st.integers(1, 40)).map(lambda span: list(range(span[0], min(sum(span), ROWS)))),
    written=st.integers(0, ROWS),
    share=st.sampled_from([0.0, 0.3, 1.0, None]),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_equal_the_arrays(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], written: int, share: float | None
) -> None:
    path = put(tmp_path_factory.mktemp("runs") / "a.zarr", written)
    content, before = zarr.open_array(path)[...], files_open()
    with pytest.MonkeyPatch.context() as patch:
        if share is not None:
            patch.setattr(_zarr_runs, "_in_memory", in_memory(share))
        found = read(readers_of(path), rows)
    assert found is not None
    assert np.array_equal(found, np.asarray(content)[rows])
    assert files_open() == before


def test_a_store_reads_runs_this_way_and_short_ones_from_its_mapping(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    gather = RunReader.gather

    def watched(reader: RunReader, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> bool:
        asked.append(gather(reader, rows, out))
        return asked[-1]

    monkeypatch.setattr(RunReader, "gather", watched)
    with ZarrStore(path) as store:
        assert np.array_equal(store.gather(range(3, 30)).numpy(), DATA[3:30])
        monkeypatch.setattr(_zarr_runs, "LEAST_BYTES", 3 * DATA[0].nbytes)
        assert np.array_equal(store.gather([3, 9, 20]).numpy(), DATA[[3, 9, 20]])
    assert asked == [True, False]


def test_a_missing_chunk_is_left_to_who_may_not_fill_it(path: Path) -> None:
    (path / "c/3/0").unlink()
    assert read(readers_of(path, fill=False), range(20)) is None
    with ZarrStore(path, strict=True) as store, pytest.raises(FileNotFoundError, match="c/3/0"):
        store.gather(range(20))


def test_a_file_of_another_length_is_left_to_who_can_tell(path: Path) -> None:
    os.truncate(path / "c/3/0", 50)
    before = files_open()
    assert read(readers_of(path), range(20)) is None
    assert files_open() == before
    with ZarrStore(path) as store, pytest.raises(OSError, match=r"c/3/0.*cut off"):
        store.gather(range(20))


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(fd: int, view: Any, offset: int) -> int:
        del fd, view, offset
        os.truncate(path / "c/0/0", 10)
        return 0

    monkeypatch.setattr(_zarr_runs, "_in_memory", cut)
    before = files_open()
    with pytest.raises(OSError, match=r"the array was cut off at byte 10") as failure:
        read(readers_of(path), range(20))
    assert failure.value.errno == errno.EIO
    assert failure.value.__notes__ == ["while rows of the array were read"]
    assert files_open() == before


def test_an_error_of_the_disk_leaves_no_file_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def failing(fd: int, view: Any, offset: int) -> int:
        del fd, view, offset
        if next(calls) == 3:
            raise OSError(errno.EIO, "bad sector")
        return 0

    monkeypatch.setattr(_zarr_runs, "_in_memory", failing)
    before = files_open()
    with pytest.raises(OSError, match="bad sector"):
        read(readers_of(path), range(ROWS))
    assert files_open() == before


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_tell_is_read_as_a_disk(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    preadv = os.preadv

    def refusing(fd: int, views: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(code, os.strerror(code))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    found = read(readers_of(path), range(ROWS))
    assert found is not None
    assert np.array_equal(found, DATA)


def test_whether_a_disk_was_waited_for_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ZarrStore(path) as store:
        store.gather(range(ROWS))
        assert not store.from_disk()
        with monkeypatch.context() as patch:
            patch.setattr(_zarr_runs, "_in_memory", in_memory(0.5))
            store.gather(range(ROWS))
            assert store.from_disk()
        store.gather(range(ROWS))
        assert not store.from_disk()


def test_whether_pages_of_mapped_files_were_asked_for_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_zarr_runs, "LEAST_BYTES", 1 << 20)
    rows, there = np.random.default_rng(0).integers(0, ROWS, 400), [True]
    monkeypatch.setattr(_pages.Arena, "_seem_resident", lambda *_: there[0])
    monkeypatch.setattr(_pages, "SAMPLE", 1)
    with ZarrStore(path) as store:
        for there[0] in (True, False, True):
            store.gather(rows)
            assert store.from_disk() is not there[0]


# ---- asked for ahead of use -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "cold", "asked"),
    [
        (range(4, 13), {1, 2, 3}, [1, 2, 3]),
        ([13, 5, 4, 12, 6], {0, 1, 3}, [1, 3]),  # in any order, and of chunks in memory nothing
        (range(4, 13), set(), []),
    ],
)
def test_chunks_of_rows_to_come_are_asked_for_unless_in_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any, cold: set[int], asked: list[int]
) -> None:
    def chunk_of(fd: int) -> int:
        return int(Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name)

    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr(_zarr_runs, "_in_memory", lambda fd, *_: 0 if chunk_of(fd) in cold else 1)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, length, _: found.append((chunk_of(fd), start, length)))
    before = files_open()
    readers_of(path).expect(np.asarray(rows, np.int64))
    assert found == [(chunk, 0, CHUNK * DATA[0].nbytes) for chunk in asked]
    assert files_open() == before


def test_of_few_rows_a_chunk_nothing_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_zarr_runs, "LEAST_BYTES", 2 * DATA[0].nbytes)
    monkeypatch.setattr(_zarr_runs, "_in_memory", lambda *_: pytest.fail("looked at a file"))
    readers_of(path).expect(np.array([0, 9, 21]))


def test_chunks_that_do_not_exist_are_nobodys_business_yet(path: Path) -> None:
    for chunk in range(5):
        (path / f"c/{chunk}/0").unlink()
    readers_of(path).expect(np.arange(ROWS))


# ---- mapped files ---------------------------------------------------------------------------------------------------


def test_a_thread_that_waits_for_room_holds_no_file_that_others_need(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_zarr_files, "MOST_FILES", 3)
    layout = raw_layout(zarr.open_array(path))
    assert layout is not None
    files = ChunkFiles(Folder(path, layout.chunk_nbytes, WIDTH * 4, ROWS // CHUNK), layout, lambda n: f"c/{n}/0", "a")
    waits, got = threading.Event(), threading.Event()

    class Telling(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    files._changed = Telling()

    def want_both() -> None:
        with files.hold(np.array([0, 5])):
            got.set()

    with files.hold(np.array([0])):
        pass
    with files.hold(np.array([1])), files.hold(np.array([2])):  # room for one, which has file 0
        waiter = threading.Thread(target=want_both, daemon=True)
        waiter.start()
        assert waits.wait(60)
        with files.hold(np.array([3])) as slots:  # had the other thread kept file 0, both would wait
            assert slots.tolist() != [-1]
            assert not got.is_set()
    assert got.wait(60)
    waiter.join()
