"""A shuffled order of n rows that is never written down: a keyed permutation, evaluated place by place.

A generalised Feistel network over Z_a x Z_b, with a * b barely above n: a place is split into two halves, and each
round turns one half by a hash of the other, which can always be turned back, so no two places meet. The few results
past n go through the network again until they fall below it (cycle walking), about one in sqrt(n).

Guarantees:
- The same ``(n, seed, epoch)`` gives the same order on every machine, in NumPy and in the CUDA kernel: all of it is
  unsigned 64-bit arithmetic that wraps.
- Memory and time go with the places asked for, not with n. An object is never changed: any thread, several at once.

Not for secrets: the rounds are chosen for statistics, not against an adversary.
"""

from __future__ import annotations

import math
import operator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 1 << 62  # halves below 2**32, so that a hash times a half stays in 64 bits

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's multipliers
_BLOCK = 1 << 14  # places worked on at a time: the scratch of a block stays in a core's cache

# Halves of a few values need more rounds until every order of the rows is equally likely.
_ROUNDS, _ROUNDS_SMALL, _SMALL = 8, 24, 1 << 10


@final
class Permutation:
    """A bijection of ``range(n)``: ``permutation(places)`` are the rows at those places of the order.

    Attributes:
        n: rows, 0 to 2**62.
        seed, epoch: what the order is keyed by; any integers.
    """

    __slots__ = ("_a", "_b", "_key", "_rounds", "epoch", "n", "seed")

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        """Costs microseconds whatever ``n``.

        Raises:
            TypeError: not integers. ValueError: ``n`` is negative or above 2**62.
        """
        self.n, self.seed, self.epoch = operator.index(n), operator.index(seed), operator.index(epoch)
        if not 0 <= self.n <= MOST_ROWS:
            raise ValueError(f"cannot shuffle {self.n} rows: from 0 to 2**62 are possible")
        root = math.isqrt(max(self.n - 1, 0)) + 1  # ceil(sqrt(n))
        self._a = root + root % 2  # even: rounds over two odd halves make even permutations only, half of all
        self._b = max(-(-self.n // self._a), 1)
        self._key = _absorb(_absorb(0, self.seed), self.epoch)
        self._rounds = _ROUNDS if self.n >= _SMALL else _ROUNDS_SMALL

    def __call__(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """Rows at ``positions`` (integers in ``[0, n)``, any shape): int64, the same shape, always a new array.

        Releases the GIL for nearly all of its time; ``positions`` is neither changed nor kept.

        Raises:
            TypeError: not integers. IndexError: a position is out of range.
        """
        places = np.asarray(positions)
        if places.dtype.kind not in "iu":
            raise TypeError(f"positions are of {places.dtype}; they must be integers from 0 to {self.n - 1}")
        if places.size and (int(places.min()) < 0 or int(places.max()) >= self.n):
            raise IndexError(f"positions {int(places.min())} to {int(places.max())} do not lie in an order of {self.n} rows")
        rows = places.astype(np.uint64, order="C")
        flat = rows.reshape(-1)
        self._pass(flat)
        beyond = np.flatnonzero(flat >= np.uint64(self.n))
        while beyond.size:
            again = flat[beyond]
            self._pass(again)
            flat[beyond] = again
            beyond = beyond[again >= np.uint64(self.n)]
        return rows.view(np.int64)

    def parameters(self) -> tuple[int, int, int, int, int]:
        """``(n, a, b, key, rounds)``: what ``permute_range`` of ``CUDA_SOURCE`` takes, each as uint64."""
        return self.n, self._a, self._b, self._key, self._rounds

    def __repr__(self) -> str:
        return f"Permutation(n={self.n}, seed={self.seed}, epoch={self.epoch})"

    def _pass(self, flat: NDArray[np.uint64]) -> None:
        """Send ``flat`` (1-d, values below a * b) once through the network, in place."""
        keys = [np.uint64(_splitmix(self._key + r * _GOLDEN)) for r in range(self._rounds)]
        scratch = np.empty((4, min(flat.size, _BLOCK)), np.uint64)
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            self._pass_block(block, scratch[:, : block.size], keys)

    def _pass_block(self, block: NDArray[np.uint64], scratch: NDArray[np.uint64], keys: list[np.uint64]) -> None:
        left, right, hashed, shifted = scratch
        a, b, half = np.uint64(self._a), np.uint64(self._b), np.uint64(32)
        mix_1, mix_2 = np.uint64(_MIX_1), np.uint64(_MIX_2)
        np.floor_divide(block, b, out=left)
        np.multiply(left, b, out=right)
        np.subtract(block, right, out=right)
        for number, key in enumerate(keys):
            turned, other, size = (left, right, a) if number % 2 == 0 else (right, left, b)
            np.bitwise_xor(other, key, out=hashed)
            np.multiply(hashed, mix_1, out=hashed)
            np.right_shift(hashed, half, out=shifted)
            np.bitwise_xor(hashed, shifted, out=hashed)
            np.multiply(hashed, mix_2, out=hashed)
            np.right_shift(hashed, half, out=hashed)
            np.multiply(hashed, size, out=hashed)  # 32 random bits times size, shifted: in [0, size) without a division
            np.right_shift(hashed, half, out=hashed)
            np.add(turned, hashed, out=turned)
            np.subtract(turned, size, out=hashed)  # wraps to something huge where turned < size,
            np.minimum(turned, hashed, out=turned)  # so the smaller of the two is turned modulo size
        np.multiply(left, b, out=block)
        np.add(block, right, out=block)


def _splitmix(value: int) -> int:
    """splitmix64's output function on ``value`` modulo 2**64."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _absorb(state: int, number: int) -> int:
    """Mix an integer of any sign and size into ``state``, 64 bits at a time."""
    words = number.to_bytes(8 * (number.bit_length() // 64 + 1), "little", signed=True)
    state = _splitmix(state ^ len(words))
    for at in range(0, len(words), 8):
        state = _splitmix(state ^ int.from_bytes(words[at : at + 8], "little"))
    return state


# ``permute_range`` writes the rows at places start to start + count to out, as int64 or, with wide = 0, as int32. Any grid.
CUDA_SOURCE = f"""
typedef unsigned long long u64;

__device__ __forceinline__ u64 permute_key(u64 value) {{
    value += {_GOLDEN}ull;
    value = (value ^ (value >> 30)) * {_MIX_1}ull;
    value = (value ^ (value >> 27)) * {_MIX_2}ull;
    return value ^ (value >> 31);
}}

__device__ __forceinline__ long long permute(long long position, u64 n, u64 a, u64 b, u64 key, u64 rounds) {{
    u64 place = (u64)position;
    do {{
        u64 left = place / b, right = place - left * b;
        for (u64 number = 0; number < rounds; ++number) {{
            bool even = number % 2 == 0;
            u64 size = even ? a : b;
            u64 hashed = ((even ? right : left) ^ permute_key(key + number * {_GOLDEN}ull)) * {_MIX_1}ull;
            hashed = (hashed ^ (hashed >> 32)) * {_MIX_2}ull;
            u64 turned = (even ? left : right) + (((hashed >> 32) * size) >> 32);
            turned = turned < size ? turned : turned - size;
            if (even) left = turned; else right = turned;
        }}
        place = left * b + right;
    }} while (place >= n);
    return (long long)place;
}}

extern "C" __global__ void permute_range(long long start, long long count, u64 n, u64 a, u64 b, u64 key, u64 rounds,
                                         long long wide, void* out) {{
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {{
        long long row = permute(start + i, n, a, b, key, rounds);
        if (wide) ((long long*)out)[i] = row; else ((int*)out)[i] = (int)row;
    }}
}}
"""
