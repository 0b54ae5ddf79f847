"""The record of the mixed-precision comparison: there after each result, added to by later runs, compared with the article."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from _mixed import output
from _mixed.record import Pair, Record, Refused, differences, missing, read
from rich.console import Console

FACTS: dict[str, Any] = {
    "benchmark": "mixed_precision",
    "command": "first",
    "machine": {"gpu": "a", "date": "1"},
    "data": ["images"],
    "options": {"size": 32, "models": ["gru", "lstm"], "no_search": False},
    "tf32": {"convolutions": True},
}


def result(model: str, precision: str, seconds: float = 1.0, **more: Any) -> output.Result:
    measured = {"seconds_an_epoch": seconds, "largest_batch": None, "test_loss": 1.0, "test_accuracy": 0.5, "complete": True}
    return {"model": model, "precision": precision, **measured, **more}


def measured(path: Path, asked: list[Pair], earlier: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """The record of a run that ended, of one second an epoch for each of ``asked``."""
    record = Record(path, {**FACTS, **facts}, asked, earlier)
    for pair in asked:
        record.keep(result(*pair))
    return record.finish()


def names(record: dict[str, Any]) -> list[str]:
    return [f"{each['model']} {each['precision']}" for each in record["results"]]


def test_after_each_result_the_file_has_all_that_there_is(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.json"
    record = Record(path, FACTS, [("gru", "fp32"), ("gru", "half")], None)
    record.keep(result("gru", "fp32", complete=False))
    assert missing(read(path)) == ["gru fp32", "gru half"]
    record.keep(result("gru", "fp32", largest_batch=10))
    assert missing(read(path)) == ["gru half"]
    record.keep(result("gru", "half", largest_batch=18))
    assert not read(path)["complete"]
    assert record.finish() == read(path)
    assert read(path)["complete"]
    assert [each["times_the_batch"] for each in read(path)["results"]] == [1, 1.8]
    assert list(path.parent.iterdir()) == [path]


def test_a_run_that_ends_without_all_that_was_asked_for_is_not_complete(tmp_path: Path) -> None:
    record = Record(tmp_path / "a.json", FACTS, [("gru", "fp32")], None)
    record.keep(result("gru", "fp32", complete=False, search_error="a mistake"))
    assert not record.finish()["complete"]


def test_a_later_run_keeps_other_results_replaces_its_own_and_says_where_they_are_from(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    measured(path, [("gru", "fp32"), ("gru", "half"), ("lstm", "half")])
    later = {"command": "second", "machine": {"gpu": "a", "date": "2"}, "data": ["text"]}
    record = Record(path, {**FACTS, **later}, [("gru", "half"), ("lstm", "fp32")], read(path))
    record.keep(result("gru", "half", seconds=0.5))
    assert names(read(path)) == ["gru fp32", "gru half", "lstm half"]
    assert not read(path)["complete"]
    record.keep(result("lstm", "fp32", seconds=3.0))
    found = record.finish()
    assert names(found) == ["gru fp32", "gru half", "lstm fp32", "lstm half"]
    assert [each["times_faster"] for each in found["results"]] == [1, 2, 1, 3]
    assert (found["command"], found["earlier"]) == ("second", [{"command": "first", "date": "1"}])
    assert found["data"] == ["images", "text"]
    assert found["complete"]


def test_what_an_earlier_run_was_cut_off_from_is_missing_until_it_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    Record(path, FACTS, [("gru", "fp32"), ("lstm", "fp32")], None).keep(result("gru", "fp32"))
    assert missing(measured(path, [("elman", "fp32")], read(path))) == ["lstm fp32"]
    assert not read(path)["complete"]
    assert measured(path, [("lstm", "fp32")], read(path))["complete"]


@pytest.mark.parametrize(
    ("part", "key", "said"),
    [
        ("options", "size", "size is 32 there and 48 here"),
        ("machine", "gpu", "gpu is 'a' there and 48 here"),
        ("machine", "driver", "driver is None there and 48 here"),
        ("tf32", "convolutions", "convolutions is True there and 48 here"),
    ],
)
def test_a_run_under_other_conditions_is_refused_and_told_which(tmp_path: Path, part: str, key: str, said: str) -> None:
    path = tmp_path / "a.json"
    before = measured(path, [("gru", "fp32")])
    other = copy.deepcopy(FACTS)
    other[part][key] = 48
    with pytest.raises(Refused, match=said):
        Record(path, other, [("lstm", "fp32")], before)
    assert read(path) == before


def test_dates_and_options_that_choose_what_to_measure_are_no_conditions() -> None:
    other = copy.deepcopy(FACTS)
    other["machine"]["date"] = "2"
    other["options"] |= {"models": ["resnet18"], "no_search": True}
    assert differences(FACTS, other) == []


@pytest.mark.parametrize(
    ("written", "said"),
    [(None, "does not exist"), ("{", "is no JSON"), ("[]", "is no record of"), ('{"benchmark": "reading"}', "is no record of")],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, written: str | None, said: str) -> None:
    path = tmp_path / "a.json"
    if written is not None:
        path.write_text(written)
    with pytest.raises(Refused, match=said):
        read(path)


# ---- ratios and tables ----------------------------------------------------------------------------------------------


def test_ratios_are_to_float32_of_the_same_model() -> None:
    slow = result("a", "fp32", 3.0, largest_batch=100)
    fast = result("a", "half", 2.0, largest_batch=180, test_accuracy=0.25)
    alone = result("b", "half", 2.0)
    first, second, third = ([each[key] for key in output.ARTICLE] for each in output.with_ratios([slow, fast, alone]))
    assert first == [1, 1, 0]
    assert second == [1.8, 1.5, -0.25]
    assert third == [None, None, None]


def shown(results: list[output.Result]) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(output.against_the_article(output.with_ratios(results)))
    return capture.get()


def test_the_articles_ratios_stand_beside_the_median_of_ours_and_their_range() -> None:
    results = [result(model, "fp32", 3.0, largest_batch=100) for model in "abc"]
    for model, seconds, batch, accuracy in (("a", 1.0, 150, 0.49), ("b", 2.0, 160, 0.5), ("c", 1.5, 190, 0.525)):
        results.append(result(model, "half", seconds, largest_batch=batch, test_accuracy=accuracy))
    lines = shown(results).splitlines()
    assert [line.split() for line in lines if "times the batch" in line] == [
        ["times", "the", "batch", "about", "1.8", "1.60", "(1.50", "to", "1.90)"]
    ]
    assert any("1.13 to 1.18   2.00 (1.50 to 3.00)" in line for line in lines)
    assert any("+0.0 (-1.0 to +2.5)" in line for line in lines)


def test_where_there_is_nothing_to_compare_the_table_says_so() -> None:
    printed = shown([result("a", "half")])
    assert "1.13 to 1.18   -" in printed
    assert "half" not in shown([result("a", "fp32")])


def test_charts_of_a_run_that_was_cut_off_have_the_bars_that_there_are(tmp_path: Path) -> None:
    part = [result("a", "fp32", largest_batch=10), result("a", "half"), result("b", "fp32")]
    output.charts(part, tmp_path / "part.png", "cut off")
    output.charts([each for each in part if each["largest_batch"] is None], tmp_path / "none.png", "no search")
    heights = [int.from_bytes((tmp_path / f"{name}.png").read_bytes()[20:24], "big") for name in ("part", "none")]
    assert heights[0] * 2 == heights[1] * 3, "a panel less, where no largest batch is known"


def test_a_record_is_plain_json(tmp_path: Path) -> None:
    found = measured(tmp_path / "a.json", [("gru", "fp32")])
    assert json.loads((tmp_path / "a.json").read_text()) == found
