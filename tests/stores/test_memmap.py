"""Mapped .npy files: what opening, writing, flushing and closing do to the file, the disk and other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rowferry.stores import MemmapStore, create_store, open_store
from rowferry.stores._npy import header_bytes
from rowferry.stores.testing import bits, random_bits, write_npy_file

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of ten rows that count up."""
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.float32).reshape(10, 4))
    return tmp_path / "x.npy"


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """``code`` in a fresh process, with ``sys.argv[1:] == args``."""
    lines = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", lines, *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def sparse(path: Path, rows: int) -> Path:
    """A .npy of ``rows`` rows of 1 KiB, none of which has a place on the disk."""
    head = header_bytes((rows, 256), torch.float32)
    path.write_bytes(head)
    os.truncate(path, len(head) + rows * 1024)
    return path


# ---- reading -------------------------------------------------------------------------------------------------


def test_nothing_that_is_done_to_what_was_read_reaches_the_file(path: Path) -> None:
    before = path.read_bytes()
    with MemmapStore(path) as store:
        rows = store.gather([0, 1, 2])
        rows.add_(1)
        assert store.memory is not None
        store.memory.add_(1)  # wrong, and no crash
    assert path.read_bytes() == before
    assert open_store(path).gather([0]).tolist() == [[0, 1, 2, 3]]


def test_without_room_for_a_private_mapping_the_file_is_opened_all_the_same(path: Path) -> None:
    rows = run(
        """
        import resource, sys
        from rowferry.stores import MemmapStore
        import numpy as np
        np.save(sys.argv[1], np.ones((1 << 15, 512), np.float32))  # 64 MiB
        held = int(open("/proc/self/statm").read().split()[5]) * 4096
        resource.setrlimit(resource.RLIMIT_DATA, (held + (32 << 20),) * 2)
        store = MemmapStore(sys.argv[1])
        print(store.gather([5, 3])[1, 0].item(), tuple(store.memory.shape))
        """,
        path.with_name("large.npy"),
    )
    assert rows.stdout == "1.0 (32768, 512)\n", rows.stderr


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_long_runs_of_rows_are_as_right_as_scattered_ones(tmp_path: Path, big_endian: bool, fortran: bool, mode: Any) -> None:
    values = random_bits((700, 70), torch.float64)
    path = write_npy_file(tmp_path / "x.npy", values, big_endian=big_endian, fortran=fortran, offset=131)
    with MemmapStore(path, mode) as store:
        assert bits(store.gather(range(3, 699))) == bits(values[3:699])
        if mode == "r+":
            store.scatter(range(5, 600), -values[5:600])
            assert bits(store.gather(range(5, 600))) == bits(-values[5:600])


def test_one_wide_row_is_read(tmp_path: Path) -> None:
    values = random_bits((3, 200_000), torch.float32)
    with MemmapStore(write_npy_file(tmp_path / "x.npy", values)) as store:
        assert bits(store.gather([1])) == bits(values[1])


def test_a_file_that_is_cut_off_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    path = write_npy_file(tmp_path / "x.npy", random_bits((1000, 100), torch.float32))
    with MemmapStore(path) as store:
        os.truncate(path, 200_000)
        with pytest.raises(OSError, match="cut off at byte"):
            store.gather(slice(None))


def test_random_rows_read_little_more_than_their_pages(tmp_path: Path) -> None:
    path = create_store(tmp_path / "x.npy", (1 << 16, 256), torch.float32, fill=1).name  # 64 MiB
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    rows = np.random.default_rng(0).integers(0, 1 << 16, 1000)
    with MemmapStore(path) as store:
        before = read_from_disk()
        store.gather(rows)
        assert read_from_disk() - before <= 4 * 2 * 4096 * len(rows)  # a row of 1 kB may lie in two pages


def read_from_disk() -> int:
    """Bytes that this process had the disk read so far."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


# ---- writing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["c", "w+", "rw", "", None])
def test_other_modes_are_refused_before_the_file_is_touched(path: Path, mode: Any) -> None:
    with pytest.raises(ValueError, match=r"'r' .*or 'r\+'"):
        MemmapStore(path, mode)


def test_a_second_writer_is_refused_and_told_the_process_of_the_first(path: Path) -> None:
    with MemmapStore(path, "r+"):
        with pytest.raises(BlockingIOError, match=rf"x\.npy is open for writing in process {os.getpid()}"):
            MemmapStore(path, "r+")
        other = run("import sys; from rowferry.stores import MemmapStore; MemmapStore(sys.argv[1], 'r+')", path)
        assert f"open for writing in process {os.getpid()}" in other.stderr
        MemmapStore(path, "r").close()  # readers may
    MemmapStore(path, "r+").close()


def test_the_lock_ends_with_close_even_while_its_memory_is_in_use(path: Path) -> None:
    store = MemmapStore(path, "r+")
    memory = store.memory
    store.close()
    with MemmapStore(path, "r+") as again:
        again.scatter([0], torch.full((1, 4), 9.0))
    assert memory is not None
    assert memory[0].tolist() == [9] * 4


def test_the_lock_ends_with_a_store_that_is_dropped(path: Path) -> None:
    store = MemmapStore(path, "r+")
    del store
    MemmapStore(path, "r+").close()


def test_a_file_that_could_not_be_opened_is_not_locked(path: Path) -> None:
    with pytest.raises(TypeError):
        MemmapStore(path, "r+", dtype=torch.bfloat16)
    MemmapStore(path, "r+").close()


def test_a_forked_child_that_ends_leaves_the_lock_to_its_parent(path: Path) -> None:
    code = """
        import os, sys
        from rowferry.stores import MemmapStore
        store = MemmapStore(sys.argv[1], "r+")
        child = os.fork()
        if not child:
            store.close()
            os._exit(0)
        os.waitpid(child, 0)
        try:
            MemmapStore(sys.argv[1], "r+")
        except BlockingIOError:
            print("locked")
        """
    assert run(code, path).stdout == "locked\n"


def test_written_rows_survive_a_process_that_is_killed(path: Path) -> None:
    code = """
        import os, signal, sys, torch
        from rowferry.stores import MemmapStore
        store = MemmapStore(sys.argv[1], "r+")
        store.scatter([3], torch.full((1, 4), 8.0))
        store.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    assert run(code, path).returncode == -9
    with MemmapStore(path, "r+") as store:  # and its lock is gone
        assert store.gather([2, 3]).tolist() == [[8, 9, 10, 11], [8] * 4]


def test_a_process_sees_what_another_wrote(path: Path) -> None:
    with MemmapStore(path, "r+") as store:
        store.scatter([3], torch.full((1, 4), 8.0))
        code = "import sys; from rowferry.stores import open_store; print(open_store(sys.argv[1]).gather([3]).tolist())"
        assert run(code, path).stdout == "[[8.0, 8.0, 8.0, 8.0]]\n"


def test_two_names_of_one_file_are_one_store(path: Path) -> None:
    link = path.with_name("link.npy")
    link.symlink_to(path)
    hard = path.with_name("hard.npy")
    os.link(path, hard)
    with MemmapStore(path) as store:
        for name in (link, hard):
            with MemmapStore(name) as other:
                assert other.identity == store.identity


def test_opening_to_write_gives_a_sparse_file_its_space_and_keeps_its_bytes(tmp_path: Path) -> None:
    path = sparse(tmp_path / "x.npy", 1000)
    before = path.read_bytes()
    with MemmapStore(path, "r"):
        assert path.stat().st_blocks * 512 < 100_000
    with MemmapStore(path, "r+"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size
    assert path.read_bytes() == before


def test_a_sparse_file_that_the_disk_has_no_room_for_is_refused_at_opening(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    try:
        path = sparse(tmp_path / "x.npy", free // 1024 + (1 << 20))
    except OSError:
        pytest.fail("the file system of the tests holds no sparse files")
    with pytest.raises(OSError, match=r"x\.npy needs .* bytes of disk"):
        MemmapStore(path, "r+")
    assert path.stat().st_blocks * 512 < 100_000
    with MemmapStore(path) as store:
        assert store.gather([-1]).sum() == 0


def test_no_file_stays_open_after_stores_that_failed_or_were_closed(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        MemmapStore(path).close()
        with pytest.raises(TypeError):
            MemmapStore(path, dtype=torch.float64)
    assert len(os.listdir("/proc/self/fd")) == before


def test_rows_past_two_to_the_31_elements_are_right(tmp_path: Path) -> None:
    rows = 2**31 // 64 + 10
    path = tmp_path / "x.npy"
    path.write_bytes(header_bytes((rows, 64), torch.int8))
    os.truncate(path, path.stat().st_size + rows * 64)  # sparse, 2 GiB
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(range(64)))
    with MemmapStore(path) as store:
        assert store.gather([-1, 0, rows - 2, rows - 1])[[0, 3]].tolist() == [list(range(64))] * 2
