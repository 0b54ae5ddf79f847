"""The demo's data, scikit-learn's bundled digits in files, and the classifier that is trained from them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rowferry.pipeline import Pipeline
from rowferry.stores import Store, create_store, open_store

from ._device import finish
from ._output import share

SEED = 0
BATCH_ROWS = 64
TEST_SHARE = 0.2
CHUNK_ROWS, SHARD_ROWS = 64, 512  # small enough that these few rows make several shards

Parts = dict[str, NDArray[np.float32] | NDArray[np.int64]]


class Training(NamedTuple):
    """How a training went: accuracy on rows it did not see; speed and waiting while it trained."""

    accuracy: float
    rows: int
    seconds: float
    rows_per_second: float
    waited_share: float


def load_parts() -> Parts:
    """The digits, shuffled and split: ``{train,test}-x`` float32 ``(n, 64)`` in 0..1, ``{train,test}-y`` int64 ``(n,)``.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the demo's digits come with scikit-learn; get it by: pip install 'rowferry[demo]'") from error
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    x, y = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    cut = round(len(y) * (1 - TEST_SHARE))
    return {"train-x": x[:cut], "train-y": y[:cut], "test-x": x[cut:], "test-y": y[cut:]}


def write_digits(directory: Path, formats: Iterable[str]) -> None:
    """Write every part in every format to ``directory``; files that hold it already are kept.

    Raises:
        FileExistsError: a file of that name holds something else.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for (part, values), suffix in itertools.product(load_parts().items(), formats):
        path, rows = directory / f"digits-{part}.{suffix}", torch.from_numpy(values)
        if path.exists():
            _require_same(path, rows)
            continue
        chunks, shards = (CHUNK_ROWS, SHARD_ROWS) if suffix == "zarr" else (None, None)
        with create_store(path, values.shape, rows.dtype, chunks=chunks, shards=shards) as store:
            store.scatter(slice(None), rows)


def train(directory: Path, suffix: str, device: torch.device, epochs: int) -> Training:
    """Train a small classifier from the files that end in ``suffix``, all batches through the pipeline; seeded.

    The caller's random state is left as it was.
    """
    model = _classifier(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with _one_thread(), contextlib.ExitStack() as files:
        pipe = files.enter_context(
            Pipeline(
                _open_part(directory, "train", suffix, files), batch_size=BATCH_ROWS, shuffle=True, seed=SEED, device=device
            )
        )
        rows, start = 0, time.perf_counter()
        batch: Any
        for _ in range(epochs):
            for batch in pipe:
                loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                rows += len(batch["y"])
        finish(device)
        seconds = time.perf_counter() - start
        waited = sum(pipe.stats().wait_seconds.values())
        accuracy = _accuracy(model, _open_part(directory, "test", suffix, files), device)
    return Training(accuracy, rows, seconds, share(rows, seconds), share(waited, seconds))


def _accuracy(model: torch.nn.Module, source: dict[str, Store], device: torch.device) -> float:
    right = total = 0
    batch: Any
    with Pipeline(source, batch_size=BATCH_ROWS, device=device) as pipe, torch.no_grad():
        for batch in pipe:
            right += int((model(batch["x"]).argmax(1) == batch["y"]).sum())
            total += len(batch["y"])
    return right / total


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Torch's operators in one thread: several, on a network this small, take ten times as long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _classifier(device: torch.device) -> torch.nn.Module:
    """A seeded two-layer network, run once so that what torch sets up at the first step is not timed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # the CPU's alone, which is the one that was forked
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
    torch.autograd.backward(model(torch.zeros(1, 64, device=device)).sum())
    model.zero_grad()
    return model


def _open_part(directory: Path, part: str, suffix: str, files: contextlib.ExitStack) -> dict[str, Store]:
    return {name: files.enter_context(open_store(directory / f"digits-{part}-{name}.{suffix}")) for name in "xy"}


def _require_same(path: Path, rows: torch.Tensor) -> None:
    with open_store(path) as store:
        same = store.shape == tuple(rows.shape) and store.dtype == rows.dtype
        if not same or not torch.equal(store.gather(slice(None)), rows):
            raise FileExistsError(
                f"{path} holds something other than the demo's digits; remove it or name another folder by --dir"
            )
