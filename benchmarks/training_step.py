"""One step of Adam on a table whose weight and two moments are in pinned host memory, against SparseAdam in GPU memory.

A batch asks for truncated-Zipf-1.05 ids; forward is embedding and sum, then backward and the update. The table is
26,800,000 x 128 float32 by default: 41 GB pinned with the moments, 13.7 GB on the card for the comparison's weight.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from _common import Batches, arguments, link, report, save, synchronize, truncated_zipf

import rowferry as rf

DIMENSION = 128
IDS = 1_048_576


def ferried(table: rf.RowTable, batches: Batches, warm: int, **settings: Any) -> dict[str, Any]:
    """Milliseconds a step in steady state, drains included as they fall."""
    losses = []
    start = 0.0
    for number, batch in enumerate(table.batches(batches, device="cuda", **settings)):
        vectors = torch.nn.functional.embedding(batch.inverse, batch.weight)
        loss = vectors.sum()
        loss.backward()
        batch.step()
        losses.append(loss.detach())
        if number == warm:
            synchronize()
            start = time.perf_counter()
    synchronize()
    seconds = (time.perf_counter() - start) / (len(batches) - warm - 1)
    if not all(torch.isfinite(torch.stack(losses)).tolist()):
        raise AssertionError("the loss is not finite")
    return {"ms_a_step": 1e3 * seconds}


def resident(rows: int, batches: Batches, warm: int) -> float:
    """The same step with everything in GPU memory: torch's embedding with sparse gradients and SparseAdam."""
    embedding = torch.nn.Embedding(rows, DIMENSION, sparse=True, device="cuda")
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()), lr=1e-3)
    start = 0.0
    for number, index in enumerate(batches):
        embedding(torch.from_numpy(index).to("cuda", non_blocking=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == warm:
            synchronize()
            start = time.perf_counter()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / (len(batches) - warm - 1)


def main() -> None:
    options = arguments(__doc__ or "")
    rows = int(options.rows_gib * (1 << 30)) // (4 * DIMENSION) if options.rows_gib != 16 else 26_800_000
    rates = link()
    print(f"link: {rates}", flush=True)
    ring = truncated_zipf(rows, IDS, 80)  # no batch comes twice: a repeated one would be carried, not fetched
    weight = rf.PinnedStore.zeros((rows, DIMENSION), torch.float32)
    table = rf.RowTable(weight, optimizer=torch.optim.Adam, optimizer_args={"lr": 1e-3, "fused": True}, device="cuda")
    results = []
    for settings in ({"staging_bytes": 8 << 30}, {"staging_bytes": 12 << 30, "depth": 3}, {"lookahead": 0}):
        steps = 40 if "lookahead" in settings else 80
        found = sorted(ferried(table, Batches(ring, steps), steps // 2, **settings)["ms_a_step"] for _ in range(options.runs))
        shown = {key: str(value) for key, value in settings.items()}
        figures = {"ms_a_step": statistics.median(found), "lowest": found[0], "highest": found[-1]}
        results.append(report({"work": "Adam, weight and moments on the host", **figures, **shown}))
    beside = sorted(resident(rows, Batches(ring, 30), 10) for _ in range(options.runs))
    results.append(report({"work": "SparseAdam, all in GPU memory", "ms_a_step": statistics.median(beside)}))
    save("training_step", options, results, link=rates, rows=rows, ids=IDS, distinct=float(len(set(ring[0].tolist())) / IDS))


if __name__ == "__main__":
    main()
