"""Text as bytes in a .npy file, cut into windows, and the task of telling the next byte.

The file holds uint8, ``(windows, length + 1)``: a window and the byte after it. A pipeline casts it to int64 on the way, so
that an eighth of the bytes cross.
"""

from __future__ import annotations

import itertools
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import rowferry as rf

CELLS: dict[str, type[nn.RNN] | type[nn.GRU] | type[nn.LSTM]] = {"elman": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
SYMBOLS = 256
TEST_SHARE = 10  # one in so many bytes, the last ones
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def write(folder: Path, path: Path | None, most: int, length: int) -> str:
    """Write ``{train,test}-text.npy`` and say what is in them: ``path``, or the sources of Python's standard library.

    Raises:
        ValueError: the text is too short for a window in each part.
    """
    said = "the sources of Python's own standard library (real text)" if path is None else str(path)
    text = library_sources(most) if path is None else path.read_bytes()
    symbols = np.frombuffer(text[:most], dtype=np.uint8)
    cut = len(symbols) - len(symbols) // TEST_SHARE
    for part, these in {"train": symbols[:cut], "test": symbols[cut:]}.items():
        if len(these) <= length:
            raise ValueError(f"{said} has {len(symbols):,} bytes; its {part} part needs more than one window of {length}")
        np.save(folder / f"{part}-text.npy", np.lib.stride_tricks.sliding_window_view(these, length + 1)[::length])
    return f"text: {said}, {len(symbols):,} bytes in windows of {length}"


def library_sources(most: int) -> bytes:
    """At least ``most`` bytes of them, if there are so many: in the order of their names, so the same with every copy of a
    version of Python; tests, and what was installed beside them, left out."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    found, size = [], 0
    for name in itertools.filterfalse(lambda name: NOT_THE_LIBRARY & set(name.parts), names):
        if size >= most:
            break
        found.append((root / name).read_bytes())
        size += len(found[-1])
    return b"".join(found)


class LanguageModel(nn.Module):
    """Bytes ``(n, length)`` to scores of the byte that follows each: ``(n, length, 256)``."""

    def __init__(self, cell: str, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, hidden)
        self.recurrent = CELLS[cell](hidden, hidden, layers, batch_first=True)
        self.decoder = nn.Linear(hidden, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        vectors = self.embedding(symbols)
        if torch.is_autocast_enabled(vectors.device.type):  # an LSTM on a CPU refuses to cast its input by itself
            vectors = vectors.to(torch.get_autocast_dtype(vectors.device.type))
        scores: Tensor = self.decoder(self.recurrent(vectors)[0])
        return scores


@dataclass(frozen=True)
class TextTask:
    """A language model with one kind of recurrent cell; its name is the cell's."""

    name: str
    folder: Path
    batch: int
    length: int
    hidden: int
    layers: int
    clip: float = 1.0

    def model(self) -> nn.Module:
        return LanguageModel(self.name, self.hidden, self.layers)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-3)

    def pipeline(self, part: str, dtype: torch.dtype, device: torch.device) -> rf.Pipeline:
        """uint8 in the file, int64 on the device; ``dtype`` is for inputs that are numbers, these are symbols."""
        del dtype
        source = {"symbols": self.folder / f"{part}-text.npy"}
        train = part == "train"
        return rf.Pipeline(
            source, batch_size=self.batch, shuffle=train, drop_last=train, dtype={"symbols": torch.int64}, device=device
        )

    def random(self, batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """A batch of noise, to try how many fit."""
        del dtype
        return {"symbols": torch.randint(SYMBOLS, (batch, self.length + 1), device=device)}

    def forward(self, model: nn.Module, batch: Any, *, train: bool) -> tuple[Tensor, Tensor]:
        """Scores ``(n * length, 256)`` and the bytes that came ``(n * length,)``."""
        del train
        symbols = batch["symbols"]
        return model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten()
