"""How much of the transfer a training loop hides, and what a loop of tiny kernels pays for the pipeline beside it.

A step is a batch and then compute that takes ``ratio`` times as long as the batch's transfer. What no pipeline can beat
is max(compute + serve, transfer): compute alone, the gather that makes a batch of its window, and the time that the same
run needs for a batch without compute.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rowferry.stores._device_contract import Device

from .clock import Timing, clock, idle
from .reading import Way

RATIOS = (0.5, 1.0, 2.0, 4.0)
_PIECES_A_STEP = 2  # at least, so that their number can be near what is wanted
_GPU_EDGES = (64, 128, 256, 512, 1024, 2048, 4096)
_CPU_EDGES = (16, 32, 64, 128)
_WINDOW_ROWS = 1 << 20
_TRIES = 4
_SUSTAINED = 0.25  # seconds of compute alone: for a few milliseconds a card runs faster than its power allows for long


class Compute(NamedTuple):
    """``step()`` launches it; ``seconds`` is how long it takes alone."""

    step: Callable[[], None]
    seconds: float


class LaunchBound(NamedTuple):
    """A loop of tiny kernels with a batch after every ``pairs_a_batch`` pairs of them.

    Attributes:
        slowdown: time of a pair beside the pipeline, over its time alone. What ``next()`` took is not in it.
        link_busy: share of the loop's time that its batches need at the link's own rate, or that the source was busy.
        us_alone: microseconds of a pair alone.
        us_next: microseconds of a ``next()``.
    """

    slowdown: float
    link_busy: float
    pairs_a_batch: int
    us_alone: float
    us_next: float


def compute_of(device: Device, seconds: float) -> Compute:
    """Work that takes about ``seconds`` a step: bf16 matrix products that fill a GPU; on a CPU exponentials in one thread.

    The largest piece of work of which a step has at least a few is used.
    """
    chosen: tuple[Callable[[int], None], float] | None = None
    for edge in _GPU_EDGES if device.is_cuda else _CPU_EDGES:
        run = _products(device, edge) if device.is_cuda else _exponentials(device, edge)
        each = _seconds_of(device, functools.partial(run, 1), enough=0.002)
        if chosen is not None and each * _PIECES_A_STEP > seconds:
            break
        chosen = run, each
    assert chosen is not None
    run, each = chosen
    times = max(round(seconds / each), 1)
    alone = _seconds_of(device, lambda: run(times), rounds=max(round(_SUSTAINED / seconds), 20), enough=_SUSTAINED)
    return Compute(lambda: run(times), alone)


def _products(device: Device, edge: int) -> Callable[[int], None]:
    """So many products of two square matrices."""
    a, b, out = (torch.randn((edge, edge), dtype=torch.bfloat16, device=device.torch) for _ in range(3))

    def run(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    run(2)
    return run


def _exponentials(device: Device, edge: int) -> Callable[[int], None]:
    """So many times the exponentials of a small square: too few values for torch to start threads that others delay."""
    a, out = (torch.ones((edge, edge), device=device.torch) for _ in range(2))

    def run(times: int) -> None:
        for _ in range(times):
            torch.exp(a, out=out)

    run(2)
    return run


def _seconds_of(device: Device, fn: Callable[[], Any], *, rounds: int = 20, enough: float = 0.02) -> float:
    """Seconds of ``fn`` among others of its kind, back to back: at most ``rounds``, fewer once they took ``enough`` to
    launch; the median of three."""
    found = []
    for _ in range(3):
        idle(device)
        start, done = clock(), 0
        while done < rounds and (not done or clock() - start < enough):
            fn()
            done += 1
        idle(device)
        found.append((clock() - start) / done)
    return statistics.median(found)


def serve_seconds(device: Device, batch: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Seconds that the device needs to gather a batch of rows out of a window of its own memory."""
    row_bytes = max(dtype.itemsize * int(torch.Size(row_shape).numel()), 1)
    rows = max(min(_WINDOW_ROWS, device.free_bytes() // 8 // row_bytes), 1)
    window = torch.zeros((rows, row_bytes), dtype=torch.uint8, device=device.torch)
    places = torch.randint(0, rows, (batch,), device=device.torch)
    window.index_select(0, places)
    return _seconds_of(device, lambda: window.index_select(0, places))


def step_run(way: Way, step: Callable[[], None], device: Device, count: int, stop: float) -> Timing:
    """``count`` batches, each with a ``step()`` after it; the clock starts after the first quarter, when windows have grown."""
    warm = count // 4
    taken, start = 0, clock()
    epoch = way.epoch(count)
    for number, _batch in enumerate(epoch):
        if number == warm:
            idle(device)
            start = clock()
        step()
        taken = number + 1 - warm
        if taken > 0 and clock() >= stop:
            break
    idle(device)
    return Timing(max(taken, 1), clock() - start)


def launch_bound(
    way: Way,
    device: Device,
    batch_bytes: int,
    rate: float,
    *,
    busy: float = 0.8,
    batches: int = 240,
    busy_seconds: Callable[[], float] | None = None,
) -> LaunchBound:
    """Pairs of tiny kernels with a batch every k-th pair, k such that the link is at least ``busy`` of the time.

    Args:
        batch_bytes: of a batch's rows. rate: of the link, GB/s.
        batches: that are timed, after a quarter as many that warm up.
        busy_seconds: how long what limits the reading has been busy so far, where that can be looked up; then
            ``link_busy`` is what it tells.

    k begins where the loop alone would keep the link that busy. It is made smaller while the loop beside the pipeline falls
    short, and larger where ``busy_seconds`` show that it mostly waited for batches; after a few tries the last one counts,
    and ``link_busy`` tells what it came to.
    """
    x = torch.zeros(64, device=device.torch)

    def pairs(number: int) -> None:
        for _ in range(number):
            x.add_(1)
            x.mul_(1)

    transfer = batch_bytes / (rate * 1e9)

    def one_pair() -> float:
        return _seconds_of(device, lambda: pairs(5000), rounds=1) / 5000

    alone = one_pair()
    k = max(int(transfer / ((busy + 0.05) * alone)), 1)
    for _ in range(_TRIES):
        before = one_pair()  # a shared machine's speed drifts: the loop is held against what is next to it
        found = _loop(way, device, pairs, k, batches, transfer, busy_seconds)
        alone = (before + one_pair()) / 2
        found = found._replace(slowdown=found.slowdown / alone, us_alone=1e6 * alone)
        pairs_us = k * found.slowdown * found.us_alone
        waits = busy_seconds is not None and found.us_next > pairs_us / 4
        if k == 1 or (found.link_busy >= busy and not waits):
            break
        k = max(int(k * found.link_busy * (1 + waits * found.us_next / pairs_us) / (busy + 0.05)), 1)
    return found


def _loop(
    way: Way,
    device: Device,
    pairs: Callable[[int], None],
    k: int,
    batches: int,
    transfer: float,
    busy_seconds: Callable[[], float] | None,
) -> LaunchBound:
    """``slowdown`` is still the seconds of a pair, not held against those alone."""
    warm = batches // 4
    epoch = way.epoch(warm + batches)
    batch: Any = None
    for _ in range(warm):
        batch = next(epoch)
        pairs(k)
    idle(device)
    was_busy = busy_seconds() if busy_seconds is not None else 0.0
    begin, inside = clock(), 0.0
    for _ in range(batches):
        asked = clock()
        batch = next(epoch)
        inside += clock() - asked
        pairs(k)
    idle(device)
    whole = clock() - begin
    took = busy_seconds() - was_busy if busy_seconds is not None else batches * transfer
    del batch, epoch
    return LaunchBound(
        slowdown=(whole - inside) / (batches * k),
        link_busy=took / whole,
        pairs_a_batch=k,
        us_alone=0.0,
        us_next=1e6 * inside / batches,
    )
