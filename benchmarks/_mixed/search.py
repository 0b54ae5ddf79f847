"""The largest batch that a model can be trained with: guessed from the memory that small ones take, and found by trying.

Batches are tried on one scale, ``size_at``, which the guess does not move: it decides how many trials there are, and nothing
else. What is reported was trained with, and the next size of the scale was tried and did not fit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from _common import synchronize

from .precision import Name, Stepper
from .training import Task, loss_of

STEPS = 32  # sizes from a power of two to the next: what is found is less than a 32nd too small
FIRST = 32  # the first that is measured
MOST = 1 << 20  # nothing larger is tried

# What torch says where no convolution of cuDNN gets the memory to work in. The same model was trained before, so one exists.
NO_ENGINE = "unable to find an engine"


class Memory(Protocol):
    """The memory that is searched: a GPU's, or in tests a pretence."""

    @property
    def limit(self) -> int:
        """Bytes that a training may take."""
        ...

    def limited(self) -> AbstractContextManager[None]:
        """The limit holds inside."""
        ...

    def clear(self) -> None:
        """Give back what nothing holds any more, and begin to measure the peak."""
        ...

    def peak(self) -> int:
        """The most bytes in use at once since ``clear``."""
        ...


class CudaMemory:
    """A GPU's memory, as torch's allocator sees it, up to ``gigabytes`` of 1e9 bytes or to all that there is."""

    def __init__(self, device: torch.device, gigabytes: float) -> None:
        self.device, self._total = device, torch.cuda.get_device_properties(device).total_memory
        self.limit = int(min(gigabytes * 1e9, self._total))

    @contextmanager
    def limited(self) -> Iterator[None]:
        torch.cuda.set_per_process_memory_fraction(self.limit / self._total, self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def clear(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


@dataclass(frozen=True)
class Search:
    """What a search within ``memory_limit`` bytes came to; ``too_large`` is None where even ``MOST`` fits."""

    memory_limit: int
    largest_batch: int
    too_large: int | None
    guess: int
    trials: int
    search_seconds: float


def searched(task: Task, precision: Name, device: torch.device, memory: Memory) -> Search:
    """The largest batch within ``memory.limit``. Each size is tried once."""
    start = time.perf_counter()
    peaks: dict[int, int | None] = {}

    def peak(batch: int) -> int | None:
        if batch not in peaks:
            peaks[batch] = trial(task, precision, device, memory, batch)
        return peaks[batch]

    gc.collect()
    gc.freeze()  # after each trial only what is newer is looked through: a tenth of a second less
    try:
        with memory.limited():
            guess = guessed(peak, memory.limit)
            found = largest(lambda batch: peak(batch) is not None, guess)
    finally:
        gc.unfreeze()
    return Search(memory.limit, found.fits, found.too_large, guess, len(peaks), time.perf_counter() - start)


def trial(task: Task, precision: Name, device: torch.device, memory: Memory, batch: int) -> int | None:
    """The most bytes that two whole steps with ``batch`` rows take, None where there are not so many."""
    memory.clear()
    try:
        _two_steps(task, precision, device, batch)
        return memory.peak()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or NO_ENGINE in str(error):
            return None
        raise
    finally:
        gc.collect()  # the error's traceback held the graph
        memory.clear()


def _two_steps(task: Task, precision: Name, device: torch.device, batch: int) -> None:
    """The second has an optimizer's state. The weights are drawn on the device: not those that a training begins with."""
    torch.manual_seed(0)
    with torch.device(device):
        model = task.model()
    stepper = Stepper(model, precision, task.optimizer, device, task.clip)
    for _ in range(2):
        loss, _ = loss_of(task, stepper, task.random(batch, stepper.dtype, device), train=True)
        stepper.step(loss)
    synchronize()


def guessed(peak: Callable[[int], int | None], limit: int) -> int:
    """Where a line through the memory that two batches take meets ``limit`` bytes. ``peak`` is None where one does not fit.

    A model takes memory of its own, so twice the batch takes less than twice the memory: the second batch needs half of the
    limit at most, and is as far from the first as that allows.
    """
    lower = peak(FIRST)
    if lower is None:
        return FIRST // 2
    second = min(max(FIRST * limit // (2 * max(lower, 1)), 2 * FIRST), MOST)
    upper = peak(second)
    if upper is None:
        return (FIRST + second) // 2
    a_row = (upper - lower) / (second - FIRST)
    return MOST if a_row <= 0 else min(second + int((limit - upper) / a_row), MOST)


class Bracket(NamedTuple):
    """The largest size that fits, 0 if none, and the next one; None past ``MOST``."""

    fits: int
    too_large: int | None


def largest(fits: Callable[[int], bool], guess: int) -> Bracket:
    """The largest of the sizes of the scale that fits, as long as all smaller ones do; no size is asked for twice.

    From the guess on in strides of 1, 2, 4 and so on until the answer changes, then by bisection. Upwards a stride at most
    doubles the batch: to run out of memory is cheap, to run into other limits of a library is not.
    """
    low, high = 0, place_of(MOST) + 1  # fits, or is nothing; does not fit, or is not tried
    place, stride = min(max(place_of(guess), 1), high - 1), 1
    if fits(size_at(place)):
        low = place
        while low + 1 < high:
            place, stride = min(low + stride, high - 1), min(2 * stride, STEPS)
            if not fits(size_at(place)):
                high = place
                break
            low = place
    else:
        high = place
        while low + 1 < high:
            place, stride = max(high - stride, low + 1), 2 * stride
            if fits(size_at(place)):
                low = place
                break
            high = place
    while high - low > 1:
        place = (low + high) // 2
        if fits(size_at(place)):
            low = place
        else:
            high = place
    return Bracket(size_at(low), None if high > place_of(MOST) else size_at(high))


def size_at(place: int) -> int:
    """Sizes that are tried: 0 to 64 one by one, then ``STEPS`` from each power of two to the next."""
    doublings = max(place // STEPS - 1, 0)
    return (place - doublings * STEPS) << doublings


def place_of(size: int) -> int:
    """Place of the largest size of the scale that is not over ``size``."""
    doublings = max(size.bit_length() - STEPS.bit_length(), 0)
    return doublings * STEPS + (size >> doublings)
