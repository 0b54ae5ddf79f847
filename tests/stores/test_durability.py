"""What a crash leaves of a .npy that is being written: whole rows, or the last flush of all files that commit together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rowferry.stores import MemmapStore, create_store, open_store
from rowferry.stores import _commit as commit
from rowferry.stores._commit import join
from rowferry.stores._redo import Redo
from rowferry.stores.testing import bits, random_bits, write_npy_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Ten rows that count up."""
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.float32).reshape(10, 4))
    return tmp_path / "x.npy"


def atomic(path: Path) -> MemmapStore:
    return MemmapStore(path, "r+", durability="atomic")


def first(path: Path) -> list[float]:
    """The first element of each row, as a new reader sees it."""
    with open_store(path) as store:
        return store.gather(slice(None))[:, 0].tolist()


BEFORE = [4.0 * row for row in range(10)]


def test_rows_that_no_flush_covers_are_rolled_back_by_the_next_opening(path: Path) -> None:
    store = atomic(path)
    store.scatter([1, 2], torch.full((2, 4), -1.0))
    store.flush()
    store.scatter([2, 3], torch.full((2, 4), -2.0))
    store.scatter([3, 9], torch.full((2, 4), -3.0))
    assert store.gather([1, 2, 3, 9])[:, 0].tolist() == [-1, -2, -3, -3]
    del store  # as a crash: nothing is flushed
    assert first(path) == [0, -1, -1, *BEFORE[3:]]
    assert first(path) == [0, -1, -1, *BEFORE[3:]]
    with atomic(path) as store:
        store.scatter([0], torch.full((1, 4), -4.0))
    assert first(path) == [-4, -1, -1, *BEFORE[3:]]  # close commits


def test_a_reader_beside_a_live_writer_rolls_nothing_back(path: Path) -> None:
    with atomic(path) as store:
        store.scatter([1], torch.full((1, 4), -1.0))
        assert first(path)[1] == -1
        store.scatter([1], torch.full((1, 4), -2.0))
    assert first(path)[1] == -2


def test_only_the_first_change_of_a_row_is_written_twice(path: Path) -> None:
    undo = path.with_name("x.npy.undo")
    with atomic(path) as store:
        store.scatter([1, 2], torch.zeros(2, 4))
        once = undo.stat().st_size
        for _ in range(5):
            store.scatter([2, 1], torch.rand(2, 4))
        assert undo.stat().st_size == once
        store.flush()
        assert undo.stat().st_size < once
        store.scatter([2, 1], torch.rand(2, 4))
        assert undo.stat().st_size == once


def test_opening_any_of_the_files_that_commit_together_rolls_all_of_them_back(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    paths = [tmp_path / "w.npy", tmp_path / "deep" / "m.npy", tmp_path / "v.npy"]
    stores = [create_store(path, (5, 2), torch.float32, durability="atomic") for path in paths]
    files = [store.durable for store in stores]
    group = join([file for file in files if file is not None])
    for number, store in enumerate(stores):
        store.scatter([number], torch.ones(1, 2))
    group.commit({"step": 7})
    for store in stores[:2]:  # the third was not reached
        store.scatter([4], torch.full((1, 2), 9.0))
    del store, stores, files, group
    open_store(paths[1]).close()
    for number, path in enumerate(paths):
        assert np.load(path)[:, 0].tolist() == [float(row == number) for row in range(5)]
        with atomic(path) as again:
            assert again.committed_state == {"step": 7}


def test_a_commit_that_was_not_cleaned_up_after_is_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = atomic(path)
    store.scatter([1], torch.full((1, 4), -1.0))
    monkeypatch.setattr(commit.Group, "settle", lambda group: None)  # killed after the record was renamed
    store.flush()
    del store
    assert first(path)[1] == -1


def test_files_that_were_committed_together_go_on_together_with_their_state(tmp_path: Path) -> None:
    paths = [tmp_path / "w.npy", tmp_path / "m.npy"]
    for state in ({"step": 1}, {"step": 2}):
        stores = [
            atomic(path) if path.exists() else create_store(path, (3, 2), torch.float32, durability="atomic") for path in paths
        ]
        group = join([store.durable for store in stores if store.durable])
        assert group.state == (None if state["step"] == 1 else {"step": 1})
        stores[1].scatter([0], torch.full((1, 2), float(state["step"])))
        group.commit(state)
        for store in stores:
            store.close()
    assert first(paths[1])[0] == 2
    with atomic(paths[1]) as alone:  # writes without the other: it leaves it
        alone.scatter([1], torch.ones(1, 2))
        alone.flush()
        assert alone.committed_state is None
    assert first(paths[0]) == [0, 0, 0]


def test_a_file_that_leaves_the_others_leaves_them_to_themselves(tmp_path: Path) -> None:
    stores = [create_store(tmp_path / name, (3, 2), torch.float32, durability="atomic") for name in ("w.npy", "m.npy")]
    join([store.durable for store in stores if store.durable])
    for store in stores:
        store.scatter([0], torch.ones(1, 2))
    w, m = (store.durable for store in stores)
    assert w is not None
    assert m is not None
    group = join([w])  # commits both
    stores[0].scatter([1], torch.ones(1, 2))
    stores[1].scatter([1], torch.ones(1, 2))
    stores[1].flush()
    assert group.dirty
    assert not m.undo.dirty
    del stores, store, w, m, group
    assert first(tmp_path / "w.npy") == [1, 0, 0]
    assert first(tmp_path / "m.npy") == [1, 1, 0]


def test_what_an_earlier_file_of_the_name_left_is_not_the_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    store = create_store(path, (3, 2), torch.float32, durability="atomic")
    assert store.durable is not None
    join([store.durable]).commit({"step": 1})
    store.scatter([0], torch.ones(1, 2))
    del store
    path.unlink()
    create_store(path, (3, 2), torch.float32, fill=5).close()
    assert first(path) == [5, 5, 5]
    with atomic(path) as again:
        assert again.committed_state is None
        assert again.durable is not None
        join([again.durable]).commit({"step": 2})
    np.save(tmp_path / "y.npy", np.zeros((3, 2), np.float32))
    os.replace(tmp_path / "y.npy", path)
    with atomic(path) as replaced:
        assert replaced.committed_state is None


def test_a_file_that_is_written_with_flush_again_leaves_nothing_beside_it(path: Path) -> None:
    with atomic(path) as store:
        store.scatter([1], torch.zeros(1, 4))
    assert sorted(each.name for each in path.parent.iterdir()) == ["x.npy", "x.npy.commit", "x.npy.undo"]
    with MemmapStore(path, "r+") as plain:
        plain.scatter([2], torch.zeros(1, 4))
        assert plain.committed_state is None
    assert [each.name for each in path.parent.iterdir()] == ["x.npy"]


def test_a_record_that_was_not_written_whole_does_not_count(path: Path) -> None:
    store = atomic(path)
    store.scatter([1], torch.full((1, 4), -1.0))
    del store
    undo = path.with_name("x.npy.undo")
    whole = undo.read_bytes()
    with undo.open("ab") as file:
        file.write(whole[8192:-1])
    assert first(path) == BEFORE


def test_an_undo_file_of_another_file_is_refused_and_named(path: Path) -> None:
    store = atomic(path)
    store.scatter([1], torch.full((1, 4), -1.0))
    del store
    other = path.with_name("y.npy")
    np.save(other, np.zeros((10, 4), np.float32))
    os.replace(other, path)
    with pytest.raises(ValueError, match=r"x\.npy\.undo is of another file.*remove .*x\.npy\.undo"):
        open_store(path)
    path.with_name("x.npy.undo").unlink()
    assert first(path) == [0.0] * 10


def test_without_the_record_of_the_commit_nothing_is_guessed(path: Path) -> None:
    store = atomic(path)
    store.scatter([1], torch.full((1, 4), -1.0))
    del store
    path.with_name("x.npy.commit").unlink()
    with pytest.raises(ValueError, match=r"x\.npy\.commit.* is gone; remove .*x\.npy\.undo"):
        open_store(path, "r+")


def test_a_forked_child_that_closes_its_copy_commits_nothing(path: Path) -> None:
    store = atomic(path)
    store.scatter([1], torch.full((1, 4), -1.0))
    child = os.fork()
    if not child:
        store.close()
        os._exit(0)
    os.waitpid(child, 0)
    del store
    assert first(path) == BEFORE


def test_rows_that_were_being_written_when_a_process_was_killed_are_finished(path: Path) -> None:
    redo, offset = path.with_name("x.npy.redo"), 128
    fd = os.open(path, os.O_RDWR)
    slots = Redo(redo, fd, offset, 16)
    with slots.holding(np.array([3, 5]), np.full(8, -1, np.float32).view(np.uint8)):
        left = redo.read_bytes()  # as a kill would leave it
    done = redo.read_bytes()
    slots.close()
    os.close(fd)
    assert not redo.exists()
    redo.write_bytes(done)
    assert first(path) == BEFORE
    redo.write_bytes(left.replace(Path("/proc/sys/kernel/random/boot_id").read_bytes().strip(), b"0" * 36))
    assert first(path) == BEFORE  # of an earlier start of the machine: its rows may not be there
    redo.write_bytes(left)
    assert first(path) == [0, 4, 8, -1, 16, -1, *BEFORE[6:]]
    assert not redo.exists()


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("width", [1, 3, 70_000])
def test_rows_of_any_width_and_byte_order_are_written_and_rolled_back_by_their_bits(
    tmp_path: Path, width: int, big_endian: bool
) -> None:
    values, new = random_bits((50, width), torch.float64), random_bits((20, width), torch.float64, seed=1)
    path = write_npy_file(tmp_path / "x.npy", values, big_endian=big_endian, offset=131)
    before = path.read_bytes()
    with MemmapStore(path, "r+") as plain:
        plain.scatter(range(0, 40, 2), new)
        assert bits(plain.gather(range(0, 40, 2))) == bits(new)
        plain.scatter(range(0, 40, 2), values[range(0, 40, 2)])
    assert path.read_bytes() == before
    store = atomic(path)
    store.scatter(range(0, 40, 2), new)
    store.scatter(range(10, 30), new)
    assert bits(store.gather(range(10, 30))) == bits(new)
    del store
    open_store(path).close()
    assert path.read_bytes() == before


# ---- arguments -----------------------------------------------------------------------------------------------------


def test_atomic_is_of_npy_files_in_c_order_that_are_written(path: Path, tmp_path: Path) -> None:
    wrong: Any = "both"
    with pytest.raises(ValueError, match=r"'both'.*'flush'.*'atomic'"):
        open_store(path, "r+", durability=wrong)
    with pytest.raises(ValueError, match=r"mode='r\+'"):
        open_store(path, durability="atomic")
    with pytest.raises(ValueError, match=r"is of \.npy"):
        create_store(tmp_path / "x.zarr", (2, 2), torch.float32, durability="atomic")
    fortran = write_npy_file(tmp_path / "f.npy", torch.rand(3, 2), fortran=True)
    with pytest.raises(ValueError, match="Fortran order"):
        open_store(fortran, "r+", durability="atomic")
    MemmapStore(fortran, "r+").close()
    assert not list(tmp_path.glob("*.undo"))
