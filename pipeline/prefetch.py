"""``rf.prefetch``: any iterable of host tensors, such as an existing DataLoader, onto the device ahead of use."""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from rowferry.stores._casts import cast, castable
from rowferry.stores._device_contract import Device, Event

from ._assembly import resolve_device_object
from ._containers import map_leaves
from ._engine import Host, Task, Threads
from ._staging import PinnedPool

T = TypeVar("T")

logger = logging.getLogger("rowferry")

STOP_SECONDS = 1.0


def prefetch(
    iterable: Iterable[T],
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    depth: int = 2,
) -> Prefetcher[T]:
    """``iterable``'s items with their tensors on ``device``, copied while the items before are used.

    Mappings and sequences are walked by protocol, dataclasses by field; objects with a ``.to`` are moved by it;
    everything else passes through. Items are ready on the stream that is current at ``next()``.

    Args:
        iterable: drawn from in a thread of its own, anew at each ``iter()``; ``len`` is its own.
        device: the current CUDA device if there is one, else the CPU.
        dtype: casts floating tensors, rounded once to nearest even.
        depth: items on their way or waiting, at least 1.

    Raises:
        TypeError, ValueError: bad arguments. Errors of ``iterable`` rise in the ``next()`` that asks for the item.
    """
    return Prefetcher(iterable, resolve_device_object(device), dtype, depth)


@final
class Prefetcher(Generic[T]):
    """What ``prefetch`` returns: re-iterable, with the iterable's ``len``. One thread uses it at a time."""

    def __init__(self, iterable: Iterable[T], device: Device, dtype: torch.dtype | None, depth: int) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth is {depth!r}; it must be an integer from 1")
        if not hasattr(iterable, "__iter__"):
            raise TypeError(f"prefetch needs an iterable, not {type(iterable).__name__}")
        if dtype is not None:
            castable(torch.float32, dtype)
        self._iterable = iterable
        self._place = device  # not `_device`: see Pipeline
        self._dtype = dtype
        self._depth = depth
        self._pool = PinnedPool(device)
        self._live: weakref.ref[_Items[T]] | None = None
        self._new_host: Callable[[], Host] = lambda: Threads(device, 1)

    @property
    def device(self) -> torch.device:
        """Where items are; as ``torch.device``, since trainers ask their loaders."""
        return self._place.torch

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]  # TypeError from the iterable when it has none

    def __iter__(self) -> Iterator[T]:
        live = self._live() if self._live is not None else None
        if live is not None:
            live.close()
        items = _Items(self._iterable, self._place, self._dtype, self._depth, self._pool, self._new_host())
        self._live = weakref.ref(items)
        return items

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the iterable, or to its sampler, when it has one."""
        owners: tuple[Any, ...] = (self._iterable, getattr(self._iterable, "sampler", None))
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def close(self) -> None:
        """Stop a live iterator. Idempotent."""
        live = self._live() if self._live is not None else None
        if live is not None:
            live.close()


class _State:
    """What the producer and the consumer share, under ``host.lock``."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.ready: deque[tuple[Any, Event | None]] = deque()
        self.error: BaseException | None = None
        self.ended = False
        self.closing = False


@final
class _Items(Iterator[T]):
    def __init__(
        self, iterable: Iterable[T], device: Device, dtype: torch.dtype | None, depth: int, pool: PinnedPool, host: Host
    ) -> None:
        self._device = device
        self._pid = os.getpid()
        self._state = _State(host)
        self._over = False
        self._stream = device.stream("prefetch")
        device.wait(self._stream, device.record(device.current()))
        mover = _Mover(device, self._stream, dtype, pool)
        host.start("prefetch", _produce(iter(iterable), self._state, mover, depth), self._escaped(self._state))
        self._finalizer = weakref.finalize(self, _stop, self._state)

    def __iter__(self) -> _Items[T]:
        return self

    def __next__(self) -> T:
        if os.getpid() != self._pid:
            raise RuntimeError("a prefetched iterator cannot be used in a forked child; start workers with the 'spawn' method")
        state = self._state
        if self._over:
            raise StopIteration
        state.host.wait(lambda: bool(state.ready) or state.ended or state.error is not None)
        if not state.ready:
            self.close()
            if state.error is not None:
                raise state.error
            raise StopIteration
        with state.host.lock:
            item, event = state.ready.popleft()
        state.host.notify()
        if event is not None:
            current = self._device.current()
            self._device.wait(current, event)
            map_leaves(item, lambda leaf: self._keep(leaf, current))
        return item  # type: ignore[no-any-return]  # the iterable's own type, tensors moved

    def close(self) -> None:
        """End the thread; idempotent."""
        if not self._over:
            self._over = True
            self._finalizer()

    def _keep(self, leaf: Any, stream: Any) -> Any:
        if isinstance(leaf, Tensor) and self._device.holds(leaf):
            self._device.keep(leaf, stream)
        return leaf

    @staticmethod
    def _escaped(state: _State) -> Any:
        def escaped(error: BaseException) -> None:
            with state.host.lock:
                state.error = state.error or error

        return escaped


class _Mover:
    """Tensors of one item to the device, on the prefetch stream."""

    def __init__(self, device: Device, stream: Any, dtype: torch.dtype | None, pool: PinnedPool) -> None:
        self._device, self._stream, self._dtype, self._pool = device, stream, dtype, pool
        # Pinned sources that torch did not lend are protected by nobody else until their copy has passed.
        self._held: deque[tuple[Event, list[Tensor]]] = deque()

    def move(self, item: Any) -> tuple[Any, Event | None]:
        """The item on the device and the event after which it is whole."""
        buffers: list[Tensor] = []
        sources: list[Tensor] = []
        while self._held and self._held[0][0].query():
            self._held.popleft()
        with self._device.use(self._stream):
            moved = map_leaves(item, lambda leaf: self._leaf(leaf, buffers, sources))
            event = self._device.record(self._stream) if self._device.asynchronous else None
        for buffer in buffers:
            self._pool.give(buffer, event)
        if sources and event is not None:
            self._held.append((event, sources))
        return moved, event

    def _leaf(self, leaf: Any, buffers: list[Tensor], sources: list[Tensor]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(self._device.torch) if hasattr(leaf, "to") else leaf
        target = self._dtype if self._dtype is not None and leaf.dtype.is_floating_point else leaf.dtype
        plain = leaf.is_cpu and leaf.layout == torch.strided and leaf.numel()
        if self._device.asynchronous and plain and not self._device.holds(leaf):
            source = leaf.detach().contiguous()
            if source.is_pinned():
                sources.append(source)
            else:
                source, buffer = self._pool.upload(source)
                buffers.append(buffer)
            out = self._device.empty(tuple(source.shape), source.dtype)
            self._device.copy(out, source)
            return out if out.dtype == target else self._cast(out, target)
        leaf = leaf.to(self._device.torch)
        return leaf if leaf.dtype == target else cast(leaf, target)

    def _cast(self, rows: Tensor, target: torch.dtype) -> Tensor:
        out = self._device.empty(tuple(rows.shape), target)
        self._device.launch("cast", lambda: out.copy_(cast(rows, target)), reads=[rows], writes=[out])
        return out


def _produce(items: Iterator[Any], state: _State, mover: _Mover, depth: int) -> Task:
    while True:
        yield lambda: len(state.ready) < depth or state.closing
        if state.closing:
            return
        try:
            entry = mover.move(next(items))
        except StopIteration:
            with state.host.lock:
                state.ended = True
            return
        except Exception as error:
            with state.host.lock:
                state.error = error
            return
        with state.host.lock:
            state.ready.append(entry)
        state.host.notify()


def _stop(state: _State) -> None:
    with state.host.lock:
        state.closing = True
        state.ready.clear()
    if stuck := state.host.stop(STOP_SECONDS):
        logger.warning("abandoned %s, stuck inside the iterable; it ends when that gives it an item", ", ".join(stuck))
