"""Files mapped side by side: bytes are where they should be, and pages are asked for as runs without overlap."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

from rowferry.stores import ZarrStore, _zarr_files
from rowferry.stores._pages import PAGE, Arena, cut_runs, page_runs, resident_file_bytes, whole_pages


@given(st.lists(st.tuples(st.integers(0, 40 * PAGE), st.integers(1, 3 * PAGE)), max_size=30), st.sampled_from([1, 100]))
def test_runs_hold_every_page_of_the_ranges_once_and_no_other(ranges: list[tuple[int, int]], far: int) -> None:
    starts = np.array([start * far for start, _ in ranges], np.int64)
    stops = starts + np.array([size for _, size in ranges], np.int64)
    first, pages = page_runs(starts, stops)
    found = [page for start, count in zip(first.tolist(), pages.tolist(), strict=True) for page in range(start, start + count)]
    assert found == sorted({page for a, b in zip(starts, stops, strict=True) for page in range(a // PAGE, (b - 1) // PAGE + 1)})
    assert bool(np.all(first[1:] > first[:-1] + pages[:-1]))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(0, 9))
def test_runs_are_the_same_whether_pages_are_counted_or_sorted(pages: list[int], gap: int) -> None:
    starts = np.array(pages, np.int64) * PAGE
    far = np.append(starts, 10**6 * PAGE)  # so far away that the pages are sorted
    near, apart = page_runs(starts, starts + PAGE + 1, gap), page_runs(far, far + PAGE + 1, gap)
    assert [each.tolist() for each in near] == [each[:-1].tolist() for each in apart]


def test_runs_with_small_gaps_become_one() -> None:
    starts = np.array([0, 3, 9, 9]) * PAGE
    assert [each.tolist() for each in page_runs(starts, starts + PAGE, 2)] == [[0, 9], [4, 1]]
    assert [each.tolist() for each in page_runs(starts, starts + PAGE, 5)] == [[0], [10]]


@pytest.mark.parametrize("refused", [False, True])
def test_files_are_read_where_they_were_placed(tmp_path: Path, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if refused:
        monkeypatch.setattr("rowferry.stores._pages._PROCESS_MADVISE", 10_000)  # a system that has no such call
    arena = Arena(100, 4 * PAGE)
    content = [os.urandom(3 * PAGE + number) for number in range(100)]
    for slot, data in enumerate(content):
        (tmp_path / str(slot)).write_bytes(data)
        fd = os.open(tmp_path / str(slot), os.O_RDONLY)
        arena.place(slot, fd, len(data))
        os.close(fd)
    starts = np.arange(100) * arena.stride + 5
    for _ in range(2):
        arena.will_need(starts[::-1], starts[::-1] + 2 * PAGE)
        assert all(
            arena.memory[s : s + 2 * PAGE].tobytes() == data[5 : 2 * PAGE + 5] for s, data in zip(starts, content, strict=True)
        )
        arena.forget()
    arena.clear(7)
    fd = os.open(tmp_path / "8", os.O_RDONLY)
    arena.place(7, fd, len(content[8]))
    os.close(fd)
    assert arena.memory[7 * arena.stride : 7 * arena.stride + len(content[8])].tobytes() == content[8]


def test_an_arena_larger_than_the_address_space_is_an_error() -> None:
    with pytest.raises(OSError, match="address space"):
        Arena(1 << 20, 1 << 40)


def test_strides_are_whole_pages_and_whole_units() -> None:
    assert whole_pages(1) == PAGE
    assert whole_pages(PAGE + 1, 3 * PAGE // 2) == 3 * PAGE
    with pytest.raises(ValueError, match="whole pages"):
        Arena(2, PAGE + 1)


def test_resident_memory_stays_flat_however_much_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_zarr_files, "RESIDENT_BYTES", 8 << 20)
    data = np.ones((1 << 16, 256), "f4")  # 64 MiB
    path = tmp_path / "a.zarr"
    layout: dict[str, Any] = {"chunks": (64, 256), "shards": (1 << 14, 256), "compressors": None}
    zarr.create_array(path, shape=data.shape, dtype="f4", **layout)[...] = data
    store = ZarrStore(path)
    out, before, most = torch.empty(1 << 12, 256), resident_file_bytes(), 0
    for seed in range(64):  # 256 MiB of rows
        store.gather(np.random.default_rng(seed).integers(0, len(data), 1 << 12), out=out)
        most = max(most, resident_file_bytes())
    assert most - before < 32 << 20


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 90)), max_size=8), st.integers(1, 40))
def test_long_runs_are_cut_into_pieces_that_hold_the_same_pages(runs: list[tuple[int, int]], most: int) -> None:
    starts, lengths = np.array(runs, np.int64).reshape(-1, 2).T
    first, pages = cut_runs(starts, lengths, most)
    assert bool(np.all(pages <= most))
    assert bool(np.all(pages > 0))
    pieces = zip(first.tolist(), pages.tolist(), strict=True)
    assert [page for start, n in pieces for page in range(start, start + n)] == [p for a, n in runs for p in range(a, a + n)]


def test_a_long_run_on_the_disk_is_asked_for_though_many_short_ones_are_in_memory(tmp_path: Path) -> None:
    path, short, long = tmp_path / "rows", 200, 4096
    path.write_bytes(bytes((16 * short + long) * PAGE))
    arena = Arena(1, (16 * short + long) * PAGE)
    starts = np.append(np.arange(short) * 16, 16 * short) * PAGE
    stops = starts + np.append(np.full(short, 1), long) * PAGE
    asked = list[int]()
    arena._advise_all = lambda runs: asked.append(int(runs["nbytes"].sum())) or True  # type: ignore[method-assign,func-returns-value]
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for start in starts[:-1].tolist():
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(file.fileno(), 1, start)
        arena.place(0, file.fileno(), len(arena.memory))
    if arena._seem_resident(np.arange(16 * short, 16 * short + long)):
        pytest.skip("this file system keeps its files in memory")
    arena.will_need(starts, stops)
    assert asked == [(short + long) * PAGE]
