"""The comparison as a table, as bar charts, and as the ratios that it is about."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]

# What is known of float16 from an article whose comparison this is; it has no figure for accuracy, which should be as good.
ARTICLE = {"times_the_batch": "about 1.8", "times_faster": "1.13 to 1.18", "accuracy_difference": "-"}


def with_ratios(results: list[Result]) -> list[Result]:
    """Each result beside the same model in float32, where there is one: speed and largest batch as multiples, accuracy less."""
    plain = {each["model"]: each for each in results if each["precision"] == "fp32"}
    found = []
    for each in results:
        base = plain.get(each["model"])
        ratios: dict[str, float | None] = dict.fromkeys(ARTICLE)  # None, where nothing is to be compared
        if base is not None:
            ratios["times_faster"] = base["seconds_an_epoch"] / each["seconds_an_epoch"]
            ratios["accuracy_difference"] = each["test_accuracy"] - base["test_accuracy"]
            if each["largest_batch"] and base["largest_batch"]:
                ratios["times_the_batch"] = each["largest_batch"] / base["largest_batch"]
        found.append({**each, **ratios})
    return found


def table(results: list[Result], caption: str) -> Table:
    """One row a model and precision: loss and accuracy are those of the test part, ``batch`` is the largest that fits."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    columns: list[tuple[str, Callable[[Result], str]]] = [
        ("model", lambda each: each["model"]),
        ("precision", lambda each: each["precision"]),
        ("s/epoch", lambda each: f"{each['seconds_an_epoch']:.2f}"),
        ("faster", lambda each: _number(each["times_faster"], ".2f")),
        ("batch", lambda each: _number(each["largest_batch"], ",")),
        ("x batch", lambda each: _number(each["times_the_batch"], ".2f")),
        ("loss", lambda each: f"{each['test_loss']:.3f}"),
        ("accuracy", lambda each: f"{each['test_accuracy']:.1%}"),
    ]
    for name, _ in columns:
        made.add_column(name, justify="left" if name in ("model", "precision") else "right", no_wrap=True)
    for place, each in enumerate(results):
        if place and results[place - 1]["model"] != each["model"]:
            made.add_section()
        made.add_row(*(show(each) for _, show in columns))
    return made


def against_the_article(results: list[Result]) -> Table:
    """The ratios that the article has, and those of ``results``: the median over the models, with the lowest and highest."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("beside float32", "article", *(lower := [name for name in _named(results, "precision") if name != "fp32"])):
        made.add_column(name, no_wrap=True)
    shown = {
        "times_the_batch": ("times the batch", 1, ".2f"),
        "times_faster": ("times faster", 1, ".2f"),
        "accuracy_difference": ("accuracy, points", 100, "+.1f"),
    }
    for key, (said, scale, form) in shown.items():
        cells = []
        for precision in lower:
            found = [scale * each[key] for each in results if each["precision"] == precision and each[key] is not None]
            middle, ends = statistics.median(found or [0]), (min(found, default=0), max(found, default=0))
            cells.append(f"{middle:{form}} ({ends[0]:{form}} to {ends[1]:{form}})" if found else "-")
        made.add_row(said, ARTICLE[key], *cells)
    return made


def _named(results: list[Result], key: str) -> list[str]:
    return list(dict.fromkeys(each[key] for each in results))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def drawing() -> type[Figure]:
    """What draws the charts.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: nothing process-wide is set
    except ImportError as error:
        raise ImportError("the charts are drawn by matplotlib; get it by: pip install 'rowferry[plot]'") from error
    return Figure


def charts(results: list[Result], path: Path, title: str) -> None:
    """Grouped bars for each model: seconds an epoch, largest batch where it was found, accuracy. A PNG."""
    panels = {
        "seconds_an_epoch": ("seconds an epoch", "{:.2f}"),
        "largest_batch": ("largest batch that fits", "{:,.0f}"),
        "test_accuracy": ("accuracy", "{:.1%}"),
    }
    shown = {key: panel for key, panel in panels.items() if any(each[key] is not None for each in results)}
    models, precisions = _named(results, "model"), _named(results, "precision")
    figure = drawing()(figsize=(max(6.0, 1.6 * len(models)), 2.6 * len(shown)), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for place, (key, (name, form)) in enumerate(shown.items()):
        axes = figure.add_subplot(len(shown), 1, place + 1)
        for number, precision in enumerate(precisions):
            bars = {each["model"]: each[key] for each in results if each["precision"] == precision and each[key] is not None}
            at = [models.index(model) + (number - (len(precisions) - 1) / 2) * 0.8 / len(precisions) for model in bars]
            drawn = axes.bar(at, list(bars.values()), 0.8 / len(precisions), label=precision)
            axes.bar_label(drawn, fmt=form, fontsize=6)
        axes.set_xticks(range(len(models)), models)
        axes.set_ylabel(name)
        axes.margins(y=0.15)
        if not place:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
