"""One step of Adam on a table whose weight and two moments are in pinned host memory, against SparseAdam in GPU memory.

A batch asks for truncated-Zipf-1.05 ids; forward is embedding and sum, then backward and the update. The table is
26,800,000 x 128 float32 by default: 41 GB pinned with the moments, 13.7 GB on the card for the comparison's weight.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from _common import arguments, limit, report, save

import rowferry as rf
from rowferry._bench.clock import clock, idle
from rowferry._bench.workloads import Batches, truncated_zipf
from rowferry.stores._devices import device_for

DIMENSION = 128
IDS = 1_048_576


def ferried(table: rf.RowTable, batches: Batches, warm: int, device: torch.device, **settings: Any) -> dict[str, Any]:
    """Milliseconds a step in steady state, drains included as they fall."""
    losses = []
    start = 0.0
    for number, batch in enumerate(table.batches(batches, device=device, **settings)):
        vectors = torch.nn.functional.embedding(batch.inverse, batch.weight)
        loss = vectors.sum()
        loss.backward()
        batch.step()
        losses.append(loss.detach())
        if number == warm:
            idle(device_for(device))
            start = clock()
    idle(device_for(device))
    seconds = (clock() - start) / (len(batches) - warm - 1)
    if not all(torch.isfinite(torch.stack(losses)).tolist()):
        raise AssertionError("the loss is not finite")
    return {"ms_a_step": 1e3 * seconds}


def resident(rows: int, batches: Batches, warm: int, device: torch.device) -> float:
    """The same step with everything in GPU memory: torch's embedding with sparse gradients and SparseAdam."""
    embedding = torch.nn.Embedding(rows, DIMENSION, sparse=True, device=device)
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()), lr=1e-3)
    start = 0.0
    for number, index in enumerate(batches):
        embedding(torch.from_numpy(index).to(device, non_blocking=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == warm:
            idle(device_for(device))
            start = clock()
    idle(device_for(device))
    return 1e3 * (clock() - start) / (len(batches) - warm - 1)


def main() -> None:
    options = arguments(__doc__ or "", needs_gpu=True)
    rows = options.rows(4 * DIMENSION) if options.rows_gib != 16 else 26_800_000
    device, ids = options.device, options.ids(IDS)
    link = limit(options)
    ring = truncated_zipf(rows, ids, options.batches(80))  # no batch comes twice: a repeated one would be carried
    weight = rf.PinnedStore.zeros((rows, DIMENSION), torch.float32)
    table = rf.RowTable(weight, optimizer=torch.optim.Adam, optimizer_args={"lr": 1e-3, "fused": True}, device=device)
    results = []
    for settings in ({"staging_bytes": 8 << 30}, {"staging_bytes": 12 << 30, "depth": 3}, {"lookahead": 0}):
        steps = options.batches(40 if "lookahead" in settings else 80)
        if options.smoke:
            settings.pop("staging_bytes", None)
        found = sorted(
            ferried(table, Batches(ring, steps), steps // 2, device, **settings)["ms_a_step"] for _ in range(options.runs)
        )
        shown = {key: str(value) for key, value in settings.items()}
        figures = {"ms_a_step": statistics.median(found), "lowest": found[0], "highest": found[-1]}
        results.append(report({"work": "Adam, weight and moments on the host", **figures, **shown}))
    steps = options.batches(30)
    beside = sorted(resident(rows, Batches(ring, steps), steps // 3, device) for _ in range(options.runs))
    results.append(report({"work": "SparseAdam, all in GPU memory", "ms_a_step": statistics.median(beside)}))
    share = float(len(set(ring[0].tolist())) / ids)
    save("training_step", options, results, link=link._asdict(), rows=rows, ids=ids, distinct=share)


if __name__ == "__main__":
    main()
