"""A picture of a record: shares of the limit as bars, and step times over their bound. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = {"reading": "#1b6ca8", "writing": "#3a9188", "peers": "#9a9a9a", "overlap": "#c66b3d"}


def require_drawable(path: Path) -> None:
    """Whether a picture of that name can be drawn.

    Raises:
        ImportError: there is no matplotlib; the message names the extra. ValueError: a suffix that it does not know.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError("pictures are drawn by matplotlib; get it by: pip install 'rowferry[plot]'") from error
    known = sorted(FigureCanvasBase.filetypes)
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"{path} names no picture that can be drawn; its suffix must be one of {', '.join(known)}")


def draw(record: dict[str, Any], path: Path) -> None:
    """Write ``path``, in the format that its suffix names. Raises as ``require_drawable``; OSError: it can't be written."""
    require_drawable(path)
    from matplotlib.figure import Figure  # no pyplot: nothing global is touched

    measured = [each for each in record["results"] if "ratio" in each]
    parts = [
        [each for each in measured if each["better"] == "higher"],
        [each for each in measured if each["better"] == "lower"],
    ]
    height = 1.6 + 0.32 * len(measured)
    figure = Figure(figsize=(9, height), layout="constrained")
    rows = figure.subplots(2, 1, height_ratios=[max(len(part), 1) for part in parts], squeeze=False)[:, 0]
    limit = record["limit"]
    titles = (
        f"share of the limit ({limit['kind']}: {limit['to_device']:.1f} GB/s in, {limit['to_host']:.1f} out)",
        "step time over max(compute + serve, transfer)",
    )
    for axes, part, title in zip(rows, parts, titles, strict=True):
        axes.barh(
            [each["work"] for each in part],
            [each["ratio"] for each in part],
            xerr=[
                [each["ratio"] - each["lowest"] for each in part],
                [each["highest"] - each["ratio"] for each in part],
            ],
            color=[_COLOURS[each["group"]] for each in part],
        )
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
    figure.suptitle(str(record["machine"].get("gpu") or record["machine"]["processor"]), fontsize=10)
    figure.savefig(path)
