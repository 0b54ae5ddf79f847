"""A window's arithmetic in a few CUDA kernels instead of some sixty torch operators: see ``_window`` for its meaning.

The plan runs beside the training step, so what it costs matters twice: launches take the GIL from the training loop, and
passes over the ids take the card's memory from its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from rowferry.stores._kernel_arguments import blocks_over
from rowferry.stores._kernel_sources import EACH, INDEX_TYPES
from rowferry.stores._kernels import INDEX_NAMES, kernels

from ._window import Layout, Older, Sorted, spread_pairs

# All kernels walk sorted ids; `first` marks the first of equal ones. Prefixes are inclusive counts, two in one number.
CUDA_SOURCE = (
    EACH
    + r"""
// Number of values that are not above x.
__device__ __forceinline__ long long not_above(const long long* values, long long n, long long x) {
    long long low = 0, high = n;
    while (low < high) {
        const long long middle = (low + high) >> 1;
        if (values[middle] <= x) low = middle + 1; else high = middle;
    }
    return low;
}

template <typename Index> __device__ __forceinline__ bool is_first(const Index* ids, long long i) {
    return i == 0 || ids[i] != ids[i - 1];
}

__device__ __forceinline__ bool is_pair(bool first, const long long* order, const long long* ends, long long batches,
                                        long long i, long long batch) {
    return first || batch != not_above(ends, batches, order[i - 1]);
}

// source[i] = line and at[i] = the place among `rows`, where an older window holds ids[i]; at the first line 0 elsewhere.
template <typename Index>
__device__ void held(const Index* ids, const Index* rows, unsigned char* source, int* at, long long n, long long m,
                     long long line, long long initial) {
    EACH(i, n) {
        const Index id = ids[i];
        long long low = 0, high = m;
        while (low < high) {
            const long long middle = (low + high) >> 1;
            if (rows[middle] < id) low = middle + 1; else high = middle;
        }
        if (low < m && rows[low] == id) {
            source[i] = (unsigned char)line;
            at[i] = (int)low;
        } else if (initial) {
            source[i] = 0;
        }
    }
}

// counts[line][batch] += rows met first in that batch, by source; the last line: distinct rows of each batch.
template <typename Index>
__device__ void count(const Index* ids, const long long* order, const long long* ends, const unsigned char* source,
                      unsigned long long* counts, long long n, long long batches, long long lines) {
    __shared__ int bins[8192];
    const long long all = (lines + 1) * batches;
    const bool local = all <= 8192;
    if (local) for (int k = threadIdx.x; k < all; k += blockDim.x) bins[k] = 0;
    __syncthreads();
    EACH(i, n) {
        const bool first = is_first(ids, i);
        const long long batch = not_above(ends, batches, order[i]);
        if (first) {
            const long long bin = (source == nullptr ? 0 : source[i]) * batches + batch;
            if (local) atomicAdd(&bins[bin], 1); else atomicAdd(&counts[bin], 1ULL);
        }
        if (is_pair(first, order, ends, batches, i, batch)) {
            const long long bin = lines * batches + batch;
            if (local) atomicAdd(&bins[bin], 1); else atomicAdd(&counts[bin], 1ULL);
        }
    }
    __syncthreads();
    if (local)
        for (int k = threadIdx.x; k < all; k += blockDim.x)
            if (bins[k]) atomicAdd(&counts[k], (unsigned long long)bins[k]);
}

// To be summed up: first ids of source `low` in the low half, of source `high` in the high half; a negative low: of all.
template <typename Index>
__device__ void flags(const Index* ids, const unsigned char* source, long long* out, long long n, long long low,
                      long long high) {
    EACH(i, n) {
        const long long mine = source == nullptr ? 0 : source[i];
        const long long first = is_first(ids, i) ? 1 : 0;
        out[i] = (low < 0 || mine == low ? first : 0) | (mine == high ? first << 32 : 0);
    }
}

// Everything about the ids of one source. among: inclusive counts of its rows, in the half that `high` names.
template <typename Index>
__device__ void place(const Index* ids, const long long* order, const unsigned char* source, const int* at,
                      const long long* total, const long long* among, long long high, const long long* old_places,
                      long long* places, Index* rows, Index* older_rows, long long* older_places, long long* carried,
                      long long* by_id, long long n, long long line, long long base) {
    EACH(i, n) {
        if (source != nullptr && source[i] != line) continue;
        const long long counted = among[i];
        const long long rank = (high ? counted >> 32 : counted & 0xffffffffLL) - 1;
        const long long mine = base + rank;
        places[order[i]] = mine;
        if (by_id != nullptr) by_id[i] = mine;
        if (!is_first(ids, i)) continue;
        const long long nth = (total[i] & 0xffffffffLL) - 1;
        rows[mine] = ids[i];
        older_rows[nth] = ids[i];
        older_places[nth] = mine;
        if (carried != nullptr) carried[rank] = old_places[at[i]];
    }
}

template <typename Index>
__device__ void pairs(const Index* ids, const long long* order, const long long* ends, bool* out, long long n,
                      long long batches) {
    EACH(i, n) out[i] = is_pair(is_first(ids, i), order, ends, batches, i, not_above(ends, batches, order[i]));
}

#define KERNEL extern "C" __global__ void __launch_bounds__(512)
#define PLAN(NAME, INDEX)                                                                                                  \
    KERNEL held_##NAME(const INDEX* ids, const INDEX* rows, unsigned char* source, int* at, long long n, long long m,      \
                       long long line, long long initial) {                                                                \
        held(ids, rows, source, at, n, m, line, initial);                                                                  \
    }                                                                                                                      \
    KERNEL count_##NAME(const INDEX* ids, const long long* order, const long long* ends, const unsigned char* source,      \
                        unsigned long long* counts, long long n, long long batches, long long lines) {                     \
        count(ids, order, ends, source, counts, n, batches, lines);                                                        \
    }                                                                                                                      \
    KERNEL flags_##NAME(const INDEX* ids, const unsigned char* source, long long* out, long long n, long long low,         \
                        long long high) {                                                                                  \
        flags(ids, source, out, n, low, high);                                                                             \
    }                                                                                                                      \
    KERNEL place_##NAME(const INDEX* ids, const long long* order, const unsigned char* source, const int* at,              \
                        const long long* total, const long long* among, long long high, const long long* old_places,       \
                        long long* places, INDEX* rows, INDEX* older_rows, long long* older_places, long long* carried,    \
                        long long* by_id, long long n, long long line, long long base) {                                   \
        place(ids, order, source, at, total, among, high, old_places, places, rows, older_rows, older_places, carried,     \
              by_id, n, line, base);                                                                                       \
    }                                                                                                                      \
    KERNEL pairs_##NAME(const INDEX* ids, const long long* order, const long long* ends, bool* out, long long n,           \
                        long long batches) {                                                                               \
        pairs(ids, order, ends, out, n, batches);                                                                          \
    }
PLAN(int32, int)
PLAN(int64, long long)
"""
)

ARGUMENTS = {"held": 8, "count": 8, "flags": 6, "place": 17, "pairs": 6}
"""How many each kernel takes; with zeros for all of them it does nothing."""


@final
class CudaPlan:
    """``count`` and ``arrange`` of ``_window.TorchPlan`` on one CUDA device, on the current stream. One thread at a time.

    Compiled and loaded at construction. Temporaries are torch's, on the current stream.

    Raises:
        ImportError: CuPy is missing or does not work; the message names the extra.
    """

    def __init__(self, device: torch.device) -> None:
        functions = {f"{name}_{index}": (0,) * number for name, number in ARGUMENTS.items() for index in INDEX_TYPES}
        self._kernels = kernels(device, CUDA_SOURCE, functions)

    def count(self, ids: Tensor, ends: Tensor, older: Sequence[Older], out: Sorted, counts: Tensor) -> None:
        """See ``_window.TorchPlan.count``."""
        torch.sort(ids, stable=True, out=(out.ids, out.order))
        source = self._sources(out.ids, older)[0] if older else None
        counts.zero_()
        lines, batches = counts.shape[0] - 1, ends.numel()
        self._launch("count", out.ids, out.ids, out.order, ends, source, counts, ids.numel(), batches, lines)
        counts.cumsum_(1)

    def arrange(self, sorted_: Sorted, ends: Tensor, older: Sequence[Older], sizes: Sequence[int], out: Layout) -> None:
        """See ``_window.TorchPlan.arrange``."""
        ids, order = sorted_.ids, sorted_.order
        n = ids.numel()
        source, at = self._sources(ids, older) if older else (None, None)
        sums = self._sums(ids, source, len(sizes))
        by_id = torch.empty_like(order) if out.batch_places is not None else None
        base = 0
        for line, size in enumerate(sizes):
            if size:
                among, high = (sums[0], 1) if line == 0 else (sums[1 + (line - 1) // 2], (line - 1) % 2)
                old_places, carried = (older[line - 1].places, out.carried[line - 1]) if line else (None, None)
                self._launch(
                    "place", ids, ids, order, source, at, sums[0], among, high, old_places, out.places, out.rows,
                    out.older.rows, out.older.places, carried, by_id, n, line, base,
                )  # fmt: skip
            base += size
        if by_id is not None and out.batch_places is not None and out.inverse is not None:
            pair = torch.empty_like(ids, dtype=torch.bool)
            self._launch("pairs", ids, ids, order, ends, pair, n, ends.numel())
            spread_pairs(pair, order, by_id, ends, out.batch_places, out.inverse)

    def _sources(self, ids: Tensor, older: Sequence[Older]) -> tuple[Tensor, Tensor]:
        """For each id the line of its source, uint8, and its place among that window's rows, int32 (else undefined)."""
        source = torch.empty_like(ids, dtype=torch.uint8)
        at = torch.empty_like(ids, dtype=torch.int32)
        for line in range(len(older), 0, -1):  # the newest is written last, so it wins
            rows = older[line - 1].rows
            self._launch("held", ids, ids, rows, source, at, ids.numel(), rows.numel(), line, line == len(older))
        return source, at

    def _sums(self, ids: Tensor, source: Tensor | None, lines: int) -> list[Tensor]:
        """Inclusive counts of first ids: of all and of line 0, then of lines 1 and 2, 3 and 4, ..."""
        sums = []
        for low, high in ((-1, 0), *((line, line + 1) for line in range(1, lines, 2))):
            flags = torch.empty_like(ids, dtype=torch.int64)
            self._launch("flags", ids, ids, source, flags, ids.numel(), low, high)
            sums.append(flags.cumsum_(0))
        return sums

    def _launch(self, name: str, like: Tensor, *arguments: Tensor | int | None) -> None:
        """Kernel ``name`` for the dtype of ``like``; a tensor goes as its pointer, None as a null pointer."""
        pointers = (one.data_ptr() if isinstance(one, Tensor) else int(one or 0) for one in arguments)
        self._kernels[f"{name}_{INDEX_NAMES[like.dtype]}"](blocks_over(like.numel()), *pointers)
