"""What URLs are taken, what is refused in words, and what the command line makes of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import rowferry as rf
from rowferry.cli import app
from rowferry.stores import RemoteStore
from rowferry.stores._url import parse_url

Publish = Callable[[Path], str]


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", np.arange(4000, dtype=np.float32).reshape(1000, 4))
    return tmp_path / "rows.npy"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://host/x.npy", r"the scheme ftp://; known are s3://, http://, https://, gs://, az://"),
        ("s3://bucket", "names no object"),
        ("s3:///x.npy", "names no object"),
        ("https://host/x.npy#rows", "fragment"),
        ("s3://bucket/x.h5", r"the suffix \.h5.*\.npy, \.zarr and \.safetensors"),
        ("s3://bucket/folder/", "no suffix"),
        ("s3://bucket/x.zip", r"the suffix \.zip"),
    ],
)
def test_a_url_that_names_no_store_is_refused_before_anything_is_asked(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        rf.open_store(url)


def test_a_url_is_split_into_what_is_asked_and_what_is_shown() -> None:
    url = parse_url("HTTPS://host:81/a%20b/c%20d.npy?sig=x/y")
    assert url.folder == "https://host:81/a%20b?sig=x/y"
    assert url.key == "c d.npy"
    assert url.name == "https://host:81/a%20b/c%20d.npy"
    assert "sig" not in repr(url)


def test_names_with_spaces_and_signs_are_found(tmp_path: Path, over_http: Publish, over_s3: Publish) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    np.save(folder / "x +=é.npy", np.arange(3))
    for url in (over_http(folder / "x +=é.npy"), over_s3(folder / "x +=é.npy")):
        with rf.open_store(url) as store:
            assert store.gather([2]).tolist() == [2]


def test_writing_to_a_url_is_refused_whoever_asks(npy: Path, over_s3: Publish, tmp_path: Path) -> None:
    url = over_s3(npy)
    told = r"rows\.(npy|zarr) is a URL, which can only be read"
    for target in (url, url.replace(".npy", ".zarr")):
        with pytest.raises(PermissionError, match=told):
            rf.open_store(target, "r+")
        with pytest.raises(PermissionError, match=told):
            rf.create_store(target, (3, 4), torch.float32)
        with pytest.raises(PermissionError, match=told), rf.open_store(npy) as store:
            store.save(target)
        with pytest.raises(PermissionError, match=told):
            rf.RowTable(target, optimizer=torch.optim.SGD, optimizer_args={"lr": 1})
    with pytest.raises(PermissionError, match=told):
        rf.ZarrStore(url.replace(".npy", ".zarr"), "r+")
    with rf.open_store(url) as store, pytest.raises(PermissionError, match="read-only"):
        rf.Pipeline(store, batch_size=5, writable=True)


def test_options_that_are_of_no_url_or_no_file_are_refused(npy: Path) -> None:
    with pytest.raises(ValueError, match="storage_options are of URLs"):
        rf.open_store(npy, storage_options={"region": "x"})
    with pytest.raises(ValueError, match="storage_options are of URLs"):
        rf.ZarrStore(npy, storage_options={"region": "x"})
    with pytest.raises(ValueError, match="cache and durability are of local files"):
        rf.open_store("s3://bucket/x.npy", cache="drop")
    with pytest.raises(ValueError, match=r"array='w' names one of several"):
        rf.open_store("s3://bucket/x.npy", array="w")
    with pytest.raises(ValueError, match="which ZarrStore reads"):
        RemoteStore("s3://bucket/x.zarr")


def test_fortran_order_is_refused_with_what_to_do(tmp_path: Path, over_http: Publish) -> None:
    np.save(tmp_path / "f.npy", np.asfortranarray(np.ones((5, 3))))
    with pytest.raises(ValueError, match=r"Fortran order.*rowferry convert"):
        rf.open_store(over_http(tmp_path / "f.npy"))


def test_without_obstore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in ("x.npy", "x.zarr"):
        with pytest.raises(ImportError, match=r"^s3://bucket/x\..* is read by obstore, .*pip install 'rowferry\[remote\]'$"):
            rf.open_store(f"s3://bucket/{name}")


def test_options_reach_the_server_in_place_of_the_environment(
    npy: Path, over_s3: Publish, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = over_s3(npy)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    options = {"endpoint": f"http://{s3_server}", "client_options": {"allow_http": True}}
    with rf.open_store(url, storage_options=options) as store:
        assert store.gather([1]).tolist() == [[4, 5, 6, 7]]
    assert options == {"endpoint": f"http://{s3_server}", "client_options": {"allow_http": True}}


def test_two_stores_of_one_url_are_the_same_file(npy: Path, over_http: Publish) -> None:
    with rf.open_store(over_http(npy)) as first, rf.open_store(over_http(npy)) as second:
        assert first.identity == second.identity


# ---- the command line -----------------------------------------------------------------------------------------


def say(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_inspect_describes_what_is_behind_a_url_and_what_a_row_costs_there(npy: Path, over_s3: Publish, tmp_path: Path) -> None:
    said = say("inspect", over_s3(npy))
    assert (said["store"], said["rows"], said["row_bytes"]) == ("RemoteStore", 1000, 16)
    assert said["random_row"]["alone_microseconds"] > 0
    assert said["random_row"]["alone_bytes"] is None, "what a network carried is not known here"
    with rf.open_store(npy) as store, rf.create_store(tmp_path / "z.zarr", (1000, 4), torch.float32, shards=False) as copy:
        copy.copy_from(store)
    said = say("inspect", over_s3(tmp_path / "z.zarr"))
    assert (said["store"], said["zarr_format"], said["random_row"]["alone_bytes"]) == ("ZarrStore", 3, None)


def test_convert_takes_a_url_as_its_source(npy: Path, over_s3: Publish, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", over_s3(npy), str(tmp_path / "copy.zarr")])
    assert result.exit_code == 0, result.output
    with rf.open_store(tmp_path / "copy.zarr") as store:
        assert np.array_equal(store.gather(slice(None)).numpy(), np.load(npy))


def test_a_command_refuses_a_url_in_one_line(over_http: Publish, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", over_http(tmp_path / "none.npy")])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "none.npy does not exist" in result.stderr
