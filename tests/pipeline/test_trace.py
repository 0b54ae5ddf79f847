"""A trace is a file that Perfetto opens: tracks of threads and streams, and waits that are named by their cause."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline, RowTable
from rowferry.pipeline.testing._timed_host import TimedHost
from rowferry.stores import ArrayStore
from rowferry.stores.testing import SimulatedDevice

Make = Callable[..., Pipeline]
FETCH, TRAIN = 4e-3, 1e-3  # seconds a batch

TRACKS = {
    "consumer thread",
    "producer thread",
    "writer thread",
    "consumer stream",
    "plan stream",
    "fetch stream",
    "writer stream",
}


def tracks(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Spans by the name of their track, as a viewer would put them together."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[names[event["pid"], event["tid"]]].append(event)
    assert set(names.values()) == TRACKS
    return spans


def timed_pipeline(batches: int, **keywords: Any) -> tuple[Pipeline, SimulatedDevice]:
    device = SimulatedDevice()
    seconds = {"train": TRAIN, "fetch": FETCH}
    device.cost = lambda stream, name, nbytes: seconds.get(name, 0.0)
    pipe = Pipeline(
        ArrayStore(torch.arange(256, dtype=torch.float32).view(128, 2)),
        batch_sampler=[[number, number + 64] for number in range(batches)],  # no range, which would cross as a plain copy
        device=device,  # type: ignore[arg-type]  # a simulated device is taken as it is
        **{"lookahead": 1, "mover": "zero-copy", "staging_bytes": 1 << 14, **keywords},
    )
    pipe._new_host = lambda: TimedHost(device)
    return pipe, device


def train(pipe: Pipeline, device: SimulatedDevice) -> None:
    for batch in pipe:
        rows = batch.values if pipe._settings.writable else batch.data
        device.launch("train", lambda: None, reads=[rows])
        if pipe._settings.writable:
            batch.write_back()


def test_spans_lie_where_and_when_the_work_was(tmp_path: Path) -> None:
    pipe, device = timed_pipeline(6)
    with pipe:
        pipe.trace(tmp_path / "t.json")
        train(pipe, device)
    spans = tracks(tmp_path / "t.json")
    assert [span["dur"] for span in spans["fetch stream"]] == pytest.approx([FETCH * 1e6] * 6)
    assert [span["ts"] for span in spans["fetch stream"]] == pytest.approx([FETCH * 1e6 * number for number in range(6)])
    waits = [span for span in spans["consumer stream"] if span["cat"] == "wait"]
    assert [span["name"] for span in waits] == ["wait: cold start"] + ["wait: link"] * 5
    assert [span["dur"] for span in waits[1:]] == pytest.approx([(FETCH - TRAIN) * 1e6] * 5)
    used = [span for span in spans["consumer stream"] if span["cat"] == "work"]
    assert [span["name"] for span in used] == [f"window {number}" for number in range(6)]
    assert [span["name"] for span in spans["consumer thread"] if span["cat"] == "work"] == [f"batch {n}" for n in range(6)]
    assert len({span["cname"] for span in waits}) == 2


def test_a_changed_row_shows_on_the_writers_tracks(tmp_path: Path) -> None:
    pipe, device = timed_pipeline(3, writable=True)
    with pipe:
        pipe.trace(tmp_path / "t.json")
        train(pipe, device)
    spans = tracks(tmp_path / "t.json")
    assert [span["name"] for span in spans["writer stream"]] == ["drain"] * 3
    assert [span["name"] for span in spans["writer thread"]] == ["drain"] * 3


def test_it_ends_after_its_steps_and_the_file_is_whole_before_the_epoch_ends(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    pipe, device = timed_pipeline(20)
    with pipe:
        pipe.trace(path, steps=4)
        for batch in pipe:
            device.launch("train", lambda: None, reads=[batch.data])
            device.drain()
            if batch.number == 10:
                break
        assert len([span for span in tracks(path)["consumer thread"] if span["cat"] == "work"]) == 4
        path.unlink()
    assert not path.exists()


def test_it_may_begin_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    pipe, device = timed_pipeline(20)
    with pipe:
        for batch in pipe:
            device.launch("train", lambda: None, reads=[batch.data])
            if batch.number == 9:
                pipe.trace(tmp_path / "t.json", steps=3)
    spans = tracks(tmp_path / "t.json")
    assert [span["name"] for span in spans["consumer thread"] if span["cat"] == "work"] == ["batch 10", "batch 11", "batch 12"]
    assert min(span["ts"] for track in spans.values() for span in track) >= 0


@pytest.mark.parametrize("way", ["threads", "inside next"])
def test_on_real_threads_no_span_crosses_another_of_its_track(
    way: str, numbered: Callable[..., Tensor], tmp_path: Path
) -> None:
    lookahead = 4 if way == "threads" else 0
    with Pipeline(numbered(256), batch_size=8, device="cpu", mover="copy", writable=True, lookahead=lookahead) as pipe:
        pipe.trace(tmp_path / "t.json", steps=100)
        for batch in pipe:
            batch.write_back()
    for track, spans in tracks(tmp_path / "t.json").items():
        inside: list[float] = []
        for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
            while inside and inside[-1] <= span["ts"] + 0.01:
                inside.pop()
            end = span["ts"] + span["dur"]
            assert not inside or end <= inside[-1] + 0.01, (track, span)
            inside.append(end)


def test_a_table_draws_its_batches_too(table: Callable[..., RowTable], tmp_path: Path) -> None:
    with table().batches([[0, 1], [2]], mover="copy") as batches:
        batches.trace(tmp_path / "t.json")
        for batch in batches:
            batch.weight.sum().backward()
            batch.step()
    assert len(tracks(tmp_path / "t.json")["writer thread"]) >= 1


def test_what_cannot_be_drawn_is_refused_at_once(ahead: Make, numbered: Callable[..., Tensor], tmp_path: Path) -> None:
    with ahead(numbered(8), batch_size=2) as pipe:
        with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
            pipe.trace(tmp_path / "t.json", steps=0)
        with pytest.raises(TypeError, match="steps must be an integer, not '3'"):
            pipe.trace(tmp_path / "t.json", steps="3")  # type: ignore[arg-type]
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            pipe.trace(tmp_path / "no" / "t.json")
        with pytest.raises(IsADirectoryError, match="is a folder; pass the name of a file"):
            pipe.trace(tmp_path)
        pipe.trace(tmp_path / "t.json")
        with pytest.raises(RuntimeError, match="being recorded already"):
            pipe.trace(tmp_path / "u.json")
    with pytest.raises(RuntimeError, match="closed"):
        pipe.trace(tmp_path / "t.json")
    with Pipeline(numbered(8), batch_size=2, device="cpu") as pipe, pytest.raises(RuntimeError, match="nothing to draw"):
        pipe.trace(tmp_path / "t.json")


def test_a_file_that_cannot_be_written_is_logged_and_the_training_goes_on(
    ahead: Make, numbered: Callable[..., Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with ahead(numbered(8), batch_size=2) as pipe:
        pipe.trace(folder / "t.json")
        folder.rmdir()
        assert len(list(pipe)) == 4
    assert "t.json was not written" in caplog.text


def test_the_file_can_be_read_by_whom_other_files_can_and_no_half_of_it_stays(
    ahead: Make, numbered: Callable[..., Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plain").touch()
    with ahead(numbered(8), batch_size=2) as pipe:
        pipe.trace(tmp_path / "t.json")
        list(pipe)
        pipe.trace(tmp_path / "u.json")
        (tmp_path / "u.json").mkdir()
        list(pipe)
    assert "u.json was not written" in caplog.text
    assert (tmp_path / "t.json").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "t.json", "u.json"]
