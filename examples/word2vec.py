"""Skip-gram word2vec with negative sampling, both tables and Adam's moments in host memory.

    python examples/word2vec.py

The corpus is real: the licences, readmes and descriptions that installed Python packages carry. Both tables (words as
centres, words as contexts) are fed from one stream of items by RowTables, prefetched while the batch before trains. Beside
it runs the same model with both tables whole on the device, read and written in a plain loop: the two loss curves must
agree, for prefetching changes no bit of what a batch sees. Ends with the nearest neighbours of frequent words; exit 1 if
the curves differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import rowferry as rf

Item = tuple[Tensor, Tensor]  # centres (batch,), and for each a true context and negatives (batch, 1 + negatives)

DOCUMENTS = re.compile(r"(^|/)(licen[cs]e|copying|readme|notice|metadata|authors|changelog|history)[^/]*$", re.IGNORECASE)


def corpus(most_bytes: int) -> list[str]:
    """Words, in order, of the documents of installed packages."""
    words: list[str] = []
    taken = 0
    for package in sorted(distributions(), key=lambda found: str(found.metadata["Name"]).lower()):
        for file in package.files or ():
            path = file.locate()
            if taken < most_bytes and DOCUMENTS.search(str(file)) and getattr(path, "is_file", bool)():
                text = path.read_bytes().decode(errors="ignore")  # type: ignore[attr-defined]
                taken += len(text)
                words += re.findall(r"[a-z]{2,}", text.lower())
    return words


class SkipGrams:
    """Batches of (centres, contexts): each centre with one word near it and some drawn by frequency ** 0.75."""

    def __init__(
        self, ids: np.ndarray, vocabulary: int, *, batches: int, batch: int, window: int = 4, negatives: int = 5
    ) -> None:
        self.ids, self.batches, self.batch, self.window, self.negatives = ids, batches, batch, window, negatives
        share = np.bincount(ids, minlength=vocabulary) ** 0.75
        self.cumulative = np.cumsum(share / share.sum())

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Item]:
        dice = np.random.default_rng(0)
        for _ in range(self.batches):
            at = dice.integers(self.window, len(self.ids) - self.window, self.batch)
            away = dice.integers(1, self.window + 1, self.batch) * dice.choice((-1, 1), self.batch)
            drawn = np.searchsorted(self.cumulative, dice.random((self.batch, self.negatives)))
            contexts = np.column_stack([self.ids[at + away], drawn.clip(max=len(self.cumulative) - 1)])
            yield torch.from_numpy(self.ids[at]), torch.from_numpy(contexts)


def loss_of(centres: Tensor, contexts: Tensor) -> Tensor:
    """``centres`` (batch, width), ``contexts`` (batch, 1 + negatives, width): mean over the batch."""
    scores = (centres[:, None] * contexts).sum(-1)
    return -(logsigmoid(scores[:, 0]) + logsigmoid(-scores[:, 1:]).sum(1)).mean()


def train_ferried(start: list[Tensor], items: SkipGrams, rate: float, device: str | None) -> tuple[list[float], Tensor]:
    """Losses, and the trained centres; tables and moments stay in host memory."""
    centres, contexts = (
        rf.RowTable(rf.PinnedStore.from_array(table), torch.optim.Adam, {"lr": rate}, device=device) for table in start
    )
    losses = []
    for batch in rf.RowTables({"centre": centres, "context": contexts}).batches(items, index={"centre": 0, "context": 1}):
        loss = loss_of(batch["centre"].lookup(), batch["context"].lookup())
        loss.backward()
        batch.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], centres.lookup(range(len(start[0])))


class Resident:
    """A table whole on the device, with Adam's moments: the rows of a batch are read, trained and written in turn."""

    def __init__(self, start: Tensor, rate: float, device: torch.device) -> None:
        self.weight = start.to(device, copy=True)
        self.moments = {name: torch.zeros_like(self.weight) for name in ("exp_avg", "exp_avg_sq")}
        self.step_count: Tensor | None = None
        self.rate = rate

    def read(self, ids: Tensor) -> Tensor:
        self.rows, inverse = torch.unique(ids, return_inverse=True)
        self.leaf = self.weight[self.rows].requires_grad_()
        return torch.nn.functional.embedding(inverse, self.leaf)

    def train(self) -> None:
        adam = torch.optim.Adam([self.leaf], lr=self.rate)
        if self.step_count is not None:
            moments = {name: moment[self.rows] for name, moment in self.moments.items()}
            adam.state[self.leaf] = {"step": self.step_count, **moments}
        adam.step()
        self.weight[self.rows] = self.leaf.detach()
        for name, moment in self.moments.items():
            moment[self.rows] = adam.state[self.leaf][name]
        self.step_count = adam.state[self.leaf]["step"]


def train_resident(start: list[Tensor], items: SkipGrams, rate: float, device: torch.device) -> list[float]:
    """Losses of the same model with everything on the device."""
    tables = [Resident(table, rate, device) for table in start]
    losses = []
    for item in items:
        loss = loss_of(*(table.read(ids.to(device)) for table, ids in zip(tables, item, strict=True)))
        loss.backward()
        for table in tables:
            table.train()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def neighbours(vectors: Tensor, word: int, count: int) -> list[int]:
    """The words whose vectors point most nearly the same way."""
    unit = torch.nn.functional.normalize(vectors, dim=1)
    return (unit @ unit[word]).topk(count + 1).indices[1:].tolist()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--batches", type=int, default=2000)
    arguments.add_argument("--batch", type=int, default=1024, help="pairs in a batch")
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--rate", type=float, default=0.01)
    arguments.add_argument("--least", type=int, default=5, help="rarer words are left out")
    arguments.add_argument("--bytes", type=int, default=20_000_000, help="of text at most")
    arguments.add_argument("--device", default=None)
    given = arguments.parse_args()

    words = corpus(given.bytes)
    vocabulary = [word for word, count in Counter(words).most_common() if count >= given.least]
    number = {word: row for row, word in enumerate(vocabulary)}
    ids = np.array([number[word] for word in words if word in number])
    print(f"corpus: {len(ids):,} words, {len(vocabulary):,} of them different")

    torch.manual_seed(0)
    start = [torch.randn(len(vocabulary), given.width) / given.width**0.5 for _ in range(2)]
    items = SkipGrams(ids, len(vocabulary), batches=given.batches, batch=given.batch)
    ferried, vectors = train_ferried(start, items, given.rate, given.device)
    resident = train_resident(start, items, given.rate, vectors.device)

    for at in sorted({*range(0, given.batches, max(given.batches // 10, 1)), given.batches - 1}):
        print(f"batch {at:5d}: loss {ferried[at]:.6f} in host memory, {resident[at]:.6f} on the device")
    for word in [word for word in ("license", "software", "copyright", "python", "data", "version") if word in number]:
        print(f"near {word}: {', '.join(vocabulary[near] for near in neighbours(vectors, number[word], 6))}")
    worst = max(abs(one - other) / max(abs(other), 1.0) for one, other in zip(ferried, resident, strict=True))
    fine = worst <= 1e-5
    said = f"loss {ferried[0]:.3f} to {ferried[-1]:.3f}, curves differ by {worst:.1e} at most"
    print(f"word2vec {'ok' if fine else 'FAILED'}: {said}")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
