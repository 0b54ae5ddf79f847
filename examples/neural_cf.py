"""Neural collaborative filtering: which modules does a source file import? Both tables in host memory.

    python examples/neural_cf.py

The interactions are real: each Python file of the installed packages is a user, each module that it imports an item. As in
recommending films, one import of each file is held out, and the model must rank it among 99 modules that the file does not
import. One Adam trains both tables and the dense layers: ``optimizer.step(); batch.write_back()``. Exit 1 unless the model
ranks better than popularity alone.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import rowferry as rf

IMPORT = re.compile(r"^\s*(?:from\s+([A-Za-z_][\w.]*)\s+import|import\s+([A-Za-z_][\w.]*))", re.MULTILINE)
NEGATIVES = 4  # drawn for each interaction in training
RIVALS = 99  # and in the test


def interactions(most_files: int, least_files: int) -> list[np.ndarray]:
    """For each file its modules' numbers, the most imported module being 0; files with fewer than 3 are left out."""
    found = []
    paths = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    for at in np.random.default_rng(0).permutation(len(paths))[:most_files]:
        names = {a or b for a, b in IMPORT.findall(paths[at].read_text(encoding="utf-8", errors="ignore"))}
        found.append(names)
    files = Counter(name for names in found for name in names)
    kept = [name for name, count in sorted(files.items(), key=lambda pair: (-pair[1], pair[0])) if count >= least_files]
    number = {name: row for row, name in enumerate(kept)}
    rows = [np.array(sorted(number[name] for name in names if name in number), dtype=np.int64) for names in found]
    return [row for row in rows if len(row) >= 3]


class Pairs:
    """Batches of (files, modules, labels): each interaction once an epoch, with modules drawn at random as negatives."""

    def __init__(self, files: np.ndarray, modules: np.ndarray, count: int, batch: int) -> None:
        self.files, self.modules, self.count, self.batch = files, modules, count, batch
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.files) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        dice = np.random.default_rng(self.epoch)
        order = dice.permutation(len(self.files))
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            drawn = dice.integers(0, self.count, (len(chosen), NEGATIVES))
            modules = np.column_stack([self.modules[chosen], drawn])
            labels = torch.zeros(modules.shape)
            labels[:, 0] = 1
            yield torch.from_numpy(self.files[chosen]), torch.from_numpy(modules), labels


class Ranker(nn.Module):
    """A row holds two vectors: one half is multiplied with its partner's, the other goes through a small network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width // 2), nn.ReLU())
        self.out = nn.Linear(width // 2 + width // 2, 1)

    def forward(self, files: Tensor, modules: Tensor) -> Tensor:
        """``(batch, width)`` and ``(batch, k, width)`` to scores ``(batch, k)``."""
        files = files[:, None].expand_as(modules)
        half = files.shape[-1] // 2
        product = files[..., :half] * modules[..., :half]
        deep = self.deep(torch.cat([files[..., half:], modules[..., half:]], -1))
        scores: Tensor = self.out(torch.cat([product, deep], -1)).squeeze(-1)
        return scores


def rivals(rows: list[np.ndarray], held: np.ndarray, count: int) -> np.ndarray:
    """For each file the module held out, then modules that it does not import: ``(files, 1 + RIVALS)``."""
    dice = np.random.default_rng(1)
    drawn = [dice.choice(np.setdiff1d(np.arange(count), row), RIVALS, replace=count - len(row) < RIVALS) for row in rows]
    return np.column_stack([held, np.stack(drawn)])


def hit_rate(scores: Tensor) -> float:
    """How often the first is among the ten highest; ties count against it."""
    return float(((scores[:, 1:] >= scores[:, :1]).sum(1) < 10).float().mean())


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--files", type=int, default=20_000)
    arguments.add_argument("--least", type=int, default=5, help="modules imported by fewer files are left out")
    arguments.add_argument("--epochs", type=int, default=8)
    arguments.add_argument("--batch", type=int, default=1024)
    arguments.add_argument("--width", type=int, default=32)
    arguments.add_argument("--device", default=None)
    given = arguments.parse_args()

    rows = interactions(given.files, given.least)
    count = 1 + max(int(row[-1]) for row in rows)
    dice = np.random.default_rng(0)
    held = np.array([dice.choice(row) for row in rows])
    files = np.concatenate([np.full(len(row) - 1, at) for at, row in enumerate(rows)])
    modules = np.concatenate([row[row != out] for row, out in zip(rows, held, strict=True)])
    print(f"{len(rows):,} files, {count:,} modules, {len(files):,} imports to learn from")

    torch.manual_seed(0)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = Ranker(given.width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    stores = [rf.PinnedStore.zeros((n, given.width), torch.float32) for n in (len(rows), count)]
    for number, store in enumerate(stores):
        store.init_(nn.init.normal_, seed=number, std=0.1)
    tables = rf.RowTables({"file": rf.RowTable(stores[0], optimizer), "module": rf.RowTable(stores[1], optimizer)})
    pairs = Pairs(files, modules, count, given.batch)
    batches = tables.batches(pairs, index={"file": 0, "module": 1}, device=device)
    for epoch in range(given.epochs):
        total = torch.zeros((), device=device)
        for batch in batches:  # an epoch; it calls set_epoch itself
            scores = model(batch["file"].lookup(), batch["module"].lookup())
            loss = nn.functional.binary_cross_entropy_with_logits(scores, batch.item[2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch.write_back()
            total += loss.detach()
        print(f"epoch {epoch}: loss {total.item() / len(batches):.4f}")

    asked = torch.from_numpy(rivals(rows, held, count))
    questions = list(zip(torch.arange(len(rows)).split(4096), asked.split(4096), strict=True))
    with torch.no_grad():
        looked = tables.batches(questions, index={"file": 0, "module": 1}, train=False)
        scores = torch.cat([model(batch["file"].lookup(), batch["module"].lookup()).cpu() for batch in looked])
    popular = -torch.from_numpy(np.argsort(np.argsort(-np.bincount(modules, minlength=count), kind="stable"))).float()
    model_hits, popular_hits = hit_rate(scores), hit_rate(popular[asked])
    fine = model_hits > popular_hits
    print(
        f"neural_cf {'ok' if fine else 'FAILED'}: held-out import in the first 10 of 100: {model_hits:.3f}, "
        f"by popularity {popular_hits:.3f}"
    )
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
