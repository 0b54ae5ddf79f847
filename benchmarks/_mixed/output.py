"""The comparison as a table, as bar charts, and as the ratios that it is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]


def with_ratios(results: list[Result]) -> list[Result]:
    """Each result with its speed and largest batch as multiples of those of the same model in float32, where there are any."""
    plain = {each["model"]: each for each in results if each["precision"] == "fp32"}
    found = []
    for each in results:
        base = plain.get(each["model"])
        ratios: dict[str, float | None] = {"times_faster": None, "times_the_batch": None}
        if base is not None:
            ratios["times_faster"] = base["seconds_an_epoch"] / each["seconds_an_epoch"]
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
        ("faster", lambda each: _ratio(each["times_faster"])),
        ("batch", lambda each: "-" if each["largest_batch"] is None else f"{each['largest_batch']:,}"),
        ("x batch", lambda each: _ratio(each["times_the_batch"])),
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


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


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
    """Grouped bars for each model: seconds an epoch, largest batch where it was tried, accuracy. A PNG."""
    panels = {"seconds_an_epoch": "seconds an epoch", "largest_batch": "largest batch that fits", "test_accuracy": "accuracy"}
    shown = {key: name for key, name in panels.items() if all(each[key] is not None for each in results)}
    models = list(dict.fromkeys(each["model"] for each in results))
    precisions = list(dict.fromkeys(each["precision"] for each in results))
    figure = drawing()(figsize=(max(6.0, 1.6 * len(models)), 2.6 * len(shown)), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for place, (key, name) in enumerate(shown.items()):
        axes = figure.add_subplot(len(shown), 1, place + 1)
        for number, precision in enumerate(precisions):
            bars = {each["model"]: each[key] for each in results if each["precision"] == precision}
            at = [models.index(model) + (number - (len(precisions) - 1) / 2) * 0.8 / len(precisions) for model in bars]
            drawn = axes.bar(at, list(bars.values()), 0.8 / len(precisions), label=precision)
            axes.bar_label(drawn, fmt="{:.3g}", fontsize=6)
        axes.set_xticks(range(len(models)), models)
        axes.set_ylabel(name)
        axes.margins(y=0.15)
        if not place:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
