"""Ways to read, rowferry's and others': they give the rows asked for, and one that does not is caught before it is timed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import rowferry as rf
from rowferry._bench.clock import NEVER
from rowferry._bench.overlap import compute_of, launch_bound, serve_seconds, step_run
from rowferry._bench.peers import PEERS, Peer, Peered, table_of
from rowferry._bench.reading import Ferried, check, reader, rows_of, stamped
from rowferry._bench.workloads import apart, uniform
from rowferry._bench.writing import Writing
from rowferry._bench.zarr_rows import zarr_rows
from rowferry.stores._devices import CpuDevice, default_device, device_for

CPU = torch.device("cpu")
RING = uniform(50, 8, 5)


@pytest.mark.parametrize("row_bytes", [1, 2, 4, 6, 512])
def test_a_table_is_stamped_with_its_row_numbers(row_bytes: int) -> None:
    with stamped(300, row_bytes) as store:
        assert store.row_nbytes == row_bytes
        table = store.torch().long()
        assert table[:, 0].tolist() == table[:, -1].tolist()
        assert table[:256, 0].tolist() == list(range(256))


@pytest.mark.parametrize("settings", [{}, {"lookahead": 0}, {"mover": "copy"}])
def test_rowferry_is_a_way_that_can_be_asked_for_any_number_of_batches(settings: dict[str, Any]) -> None:
    with stamped(50, 64) as store, Ferried(store, RING, CPU, **settings) as way:
        check(way, RING, rows_of(store), "rowferry")
        assert reader(way, CPU)(7, NEVER).batches == 7
        assert reader(way, CPU)(2, NEVER).batches == 2


def test_a_run_ends_when_its_time_is_up_after_one_batch_at_least() -> None:
    with stamped(50, 64) as store, Ferried(store, RING, CPU) as way:
        assert reader(way, CPU)(1000, 0.0).batches == 1


@pytest.mark.parametrize("peer", [peer for peer in PEERS if "CuPy" not in peer.name], ids=lambda peer: peer.name)
def test_every_peer_gives_the_rows_asked_for(peer: Peer) -> None:
    with stamped(50, 64) as store:
        table = table_of(store, CpuDevice())
        assert peer.problem(table) == ""
        check(Peered(peer, table, RING), RING, table.host, peer.name, 9)


def test_a_peer_that_cannot_read_a_table_here_says_why(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "x.zarr", data=np.arange(100.0).reshape(50, 2), chunks=(10, 2))
    with stamped(50, 64) as pinned, rf.as_store(array) as chunked:
        problems = {peer.name: peer.problem(table_of(pinned, CpuDevice())) for peer in PEERS}
        assert problems["CuPy fancy indexing over pinned memory"] == "CuPy needs a GPU"
        assert sum(map(bool, problems.values())) == 1
        assert "ZarrStore" in PEERS[1].problem(table_of(chunked, CpuDevice()))


def test_peers_of_a_zarr_array_index_it_as_its_own_users_do(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "g.zarr").create_array("x", data=np.arange(100, dtype=">f4").reshape(50, 2), chunks=(10, 2))
    with rf.ZarrStore(tmp_path / "g.zarr", array="x") as store:
        table = table_of(store, CpuDevice(), zarr_rows(str(tmp_path / "g.zarr"), "x", store))
        check(Peered(PEERS[0], table, RING), RING, store.gather, "zarr")


class Wrong:
    """A way whose batch number ``bad`` holds other rows."""

    def __init__(self, table: torch.Tensor, bad: int, shape: tuple[int, ...] = (8, 16)) -> None:
        self.table, self.bad, self.shape = table, bad, shape

    def epoch(self, count: int) -> Iterator[torch.Tensor]:
        for number in range(count):
            rows = self.table[torch.from_numpy(RING[number % len(RING)])].view(self.shape)
            yield rows + 1 if number == self.bad else rows

    def close(self) -> None:
        pass


class Nothing:
    """A way whose epochs are over at once."""

    def epoch(self, count: int) -> Iterator[torch.Tensor]:
        del count
        return iter(())

    def close(self) -> None:
        pass


def test_wrong_rows_wrong_shapes_and_missing_batches_are_not_timed() -> None:
    with stamped(50, 64) as store:
        for way, said in (
            (Wrong(store.torch(), 2), "batch 2 holds rows that were not asked for"),
            (Wrong(store.torch(), -1, (16, 8)), r"\(16, 8\)"),
        ):
            with pytest.raises(AssertionError, match=said):
                check(way, RING, rows_of(store), "other")
        with pytest.raises(AssertionError, match="0 batches came, and 4 were asked for"):
            check(Nothing(), RING, rows_of(store), "other")


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("settings", [{}, {"mover": "copy"}])
def test_written_rows_are_found_in_the_store_and_lost_ones_are_noticed(fetch: bool, settings: dict[str, Any]) -> None:
    ring = apart(50, 8, 4)
    with stamped(50, 64) as store, Writing(store, ring, CPU, fetch=fetch, **settings) as writing:
        assert writing(6, NEVER).batches == 6
        writing.check()
        assert writing(3, 0.0).batches == 1
        writing.check()
        store.torch()[ring[0][0]] = -1
        with pytest.raises(AssertionError, match="does not hold the rows"):
            writing.check()


def test_a_step_is_a_batch_and_then_compute_and_a_quarter_of_them_warms_up() -> None:
    device = CpuDevice()
    compute = compute_of(device, 0.005)
    compute.step()
    assert compute.seconds > 0
    assert serve_seconds(device, 8, (16,), torch.int32) > 0
    steps = []
    with stamped(50, 64) as store, Ferried(store, RING, CPU) as way:
        assert step_run(way, lambda: steps.append(1), device, 8, NEVER).batches == 6  # a quarter warms up
        assert len(steps) == 8
        assert step_run(way, lambda: steps.append(1), device, 1, NEVER).batches == 1


def test_a_launch_bound_loop_has_the_more_pairs_a_batch_the_slower_its_link() -> None:
    with stamped(5000, 512) as store, Ferried(store, uniform(5000, 64, 64), CPU) as way:
        fast, slow = (launch_bound(way, CpuDevice(), 64 * 512, rate, batches=8) for rate in (1000.0, 0.001))
    assert fast.pairs_a_batch == 1 < slow.pairs_a_batch
    for found in (fast, slow):
        assert min(found.slowdown, found.link_busy, found.us_alone, found.us_next) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_gives_the_rows_asked_for_on_the_gpu(peer: Peer) -> None:
    with stamped(5000, 512) as store:
        ring = uniform(5000, 1000, 5)
        table = table_of(store, device_for(default_device()))
        assert peer.problem(table) == ""
        check(Peered(peer, table, ring), ring, table.host, peer.name, 12)
