"""Servers that fail in transit are asked again; what stays broken is an error that says what and where."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rowferry as rf
from rowferry.stores._zarr_create import create_zarr

Publish = Callable[[Path], str]
ROWS, WIDTH = 4000, 300
PATIENT: dict[str, Any] = {"retry_config": {"max_retries": 8, "backoff": {"init_backoff": timedelta(milliseconds=5)}}}
HASTY: dict[str, Any] = {"retry_config": {"max_retries": 1, "backoff": {"init_backoff": timedelta(milliseconds=5)}}}


@pytest.fixture
def values() -> torch.Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)


@pytest.fixture
def npy(tmp_path: Path, values: torch.Tensor) -> Path:
    np.save(tmp_path / "rows.npy", values.numpy())
    return tmp_path / "rows.npy"


def zarr_of(values: torch.Tensor, path: Path, **layout: Any) -> Path:
    with create_zarr(path, tuple(values.shape), values.dtype, **layout) as store:
        store.scatter(slice(None), values)
    return path


@pytest.fixture(params=["npy", "raw chunks", "raw shards", "zstd"])
def url(request: pytest.FixtureRequest, npy: Path, values: torch.Tensor, tmp_path: Path, failing_s3: Publish) -> str:
    if request.param == "npy":
        return failing_s3(npy)
    layout: dict[str, dict[str, Any]] = {
        "raw chunks": {"shards": False},
        "raw shards": {"shards": 1000},
        "zstd": {"shards": 1000, "compressor": "zstd"},
    }
    return failing_s3(zarr_of(values, tmp_path / "rows.zarr", chunks=200, **layout[request.param]))


@pytest.mark.parametrize("fault", ["error", "reset", "cut", "slow"])
def test_rows_come_right_through_errors_lost_connections_and_slow_bodies(
    url: str, fault: str, proxy: Any, values: torch.Tensor
) -> None:
    wanted = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:500]
    proxy.faults.extend([fault])
    with rf.open_store(url, storage_options=PATIENT) as store:
        proxy.faults.extend([fault, fault, fault])
        assert store.gather(wanted).equal(values[wanted])
        asked = len(proxy.ranges)
        assert not proxy.faults, "the test must have failed some requests"
        assert asked > 4


def test_a_server_that_always_fails_is_an_error_that_names_the_object(
    npy: Path, failing_s3: Publish, proxy: Any, values: torch.Tensor
) -> None:
    with rf.open_store(failing_s3(npy), storage_options=HASTY) as store:
        proxy.faults.extend(["error"] * 100)
        with pytest.raises(OSError, match=r"s3://.*/rows\.npy could not be read: .*503"):
            store.gather([1, 2, 3])
        proxy.faults.clear()
        assert store.gather([1, 2, 3]).equal(values[1:4])


def test_one_object_that_fails_ends_the_request_for_all(
    values: torch.Tensor, tmp_path: Path, failing_s3: Publish, proxy: Any
) -> None:
    url = failing_s3(zarr_of(values, tmp_path / "rows.zarr", chunks=10, shards=False))
    with rf.open_store(url, storage_options=HASTY) as store:
        proxy.faults.extend(["error"] * 1000)
        with pytest.raises(OSError, match=r"rows\.zarr/c/\d+/0 could not be read"):
            store.gather(slice(None))
        assert len(proxy.faults) > 800, "what was not under way yet is not asked for any more"


def test_a_server_that_refuses_the_credentials_is_a_permission_error(npy: Path, failing_s3: Publish, proxy: Any) -> None:
    url = failing_s3(npy)
    proxy.faults.extend(["refuse"])
    with pytest.raises(PermissionError, match=r"may not be read with the credentials"):
        rf.open_store(url)
    with rf.open_store(url) as store:
        proxy.faults.extend(["refuse"])
        with pytest.raises(PermissionError, match=r"s3://.*/rows\.npy may not be read"):
            store.gather([0])


def test_a_pipeline_over_a_failing_server_serves_the_rows_of_the_plain_loop(url: str, proxy: Any, values: torch.Tensor) -> None:
    with rf.open_store(url, storage_options=PATIENT) as store, rf.Pipeline(store, batch_size=256, shuffle=True, seed=3) as pipe:
        seen = []
        for number, batch in enumerate(pipe):
            if number == 2:
                proxy.faults.extend(["cut", "error", "reset"])
            assert batch.data.equal(values[batch.index])
            seen.append(batch.index)
    assert torch.cat(seen).sort().values.equal(torch.arange(ROWS))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a terminal; a shell has what it starts in the background ignore Ctrl+C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_request_that_the_server_does_not_answer(npy: Path, over_http: Publish, files: Any) -> None:
    with rf.open_store(over_http(npy)) as store:
        files.faults.append("interrupt")
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            store.gather([5])
        assert time.monotonic() - start < 10
        assert store.gather([5]).shape == (1, WIDTH)


# ---- what no retry heals --------------------------------------------------------------------------------------


@pytest.fixture
def over(over_http: Publish) -> Publish:
    return over_http


def test_an_object_that_was_replaced_is_noticed_even_where_its_rows_fit(npy: Path, over: Publish, values: torch.Tensor) -> None:
    with rf.open_store(over(npy)) as store:
        assert store.gather([7]).equal(values[7:8])
        np.save(npy, values.numpy() + 1)
        os.utime(npy, (1e9, 1e9))
        with pytest.raises(OSError, match=r"rows\.npy was replaced since it was opened.*[Oo]pen it again"):
            store.gather([7])
    with rf.open_store(over(npy)) as store:
        assert store.gather([7]).equal(values[7:8] + 1)


def test_an_object_that_was_removed_or_cut_off_is_an_error(npy: Path, over: Publish) -> None:
    with rf.open_store(over(npy)) as store:
        os.truncate(npy, 100_000)
        with pytest.raises(OSError, match=r"rows\.npy"):
            store.gather([ROWS - 1])
        npy.unlink()
        with pytest.raises(FileNotFoundError, match=r"rows\.npy was removed"):
            store.gather([0])


def test_an_object_that_is_shorter_than_its_header_says_is_refused_at_the_opening(npy: Path, over: Publish) -> None:
    os.truncate(npy, npy.stat().st_size - 1)
    with pytest.raises(ValueError, match="is cut off"):
        rf.open_store(over(npy))


@pytest.mark.parametrize("shards", [False, 1000])
def test_missing_chunks_read_as_the_fill_value_and_are_an_error_when_strict(
    shards: Any, values: torch.Tensor, tmp_path: Path, over: Publish
) -> None:
    path = zarr_of(values, tmp_path / "rows.zarr", chunks=200, shards=shards)
    gone = path / "c" / "2" / "0"
    gone.unlink()
    rows = torch.arange(ROWS)
    lost = (rows >= 2000) & (rows < 3000) if shards else (rows >= 400) & (rows < 600)
    with rf.open_store(over(path)) as store:
        wanted = torch.randperm(ROWS, generator=torch.Generator().manual_seed(5))
        assert store.gather(wanted).equal(torch.where(lost[:, None], torch.zeros(()), values)[wanted])
    with rf.ZarrStore(over(path), strict=True) as store:
        assert store.gather([0]).equal(values[:1])
        with pytest.raises(FileNotFoundError, match=r"chunk 'c/2/0' of .* is missing"):
            store.gather([0, 2100 if shards else 401])


def test_a_shard_that_is_cut_off_or_broken_is_an_error_that_names_it(
    values: torch.Tensor, tmp_path: Path, over: Publish
) -> None:
    path = zarr_of(values, tmp_path / "rows.zarr", chunks=200, shards=1000)
    os.truncate(path / "c" / "1" / "0", 50)
    shard = path / "c" / "3" / "0"
    shard.write_bytes(shard.read_bytes()[:-8] + b"12345678")
    with rf.open_store(over(path)) as store:
        with pytest.raises(OSError, match=r"'c/1/0' of .* cut off"):
            store.gather([1500])
        with pytest.raises(OSError, match=r"'c/3/0' of .* is broken"):
            store.gather([3500])
        assert store.gather([500]).equal(values[500:501])


def test_a_server_that_sends_objects_whole_only_is_refused_in_words(npy: Path, files: Any, over: Publish) -> None:
    files.whole = True
    with pytest.raises(OSError, match=r"rows\.npy cannot be read in parts, which its server does not support"):
        rf.open_store(over(npy))


@pytest.mark.parametrize("fault", ["error", "reset", "cut", "slow"])
def test_rows_come_right_from_a_failing_server_of_files_that_have_no_tag(
    fault: str, npy: Path, files: Any, over: Publish, values: torch.Tensor
) -> None:
    with rf.open_store(over(npy), storage_options=PATIENT) as store:
        files.faults.extend([fault, fault])
        assert store.gather(slice(100, 3000)).equal(values[100:3000])
        assert not files.faults
