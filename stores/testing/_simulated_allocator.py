"""Memory of the simulated device: pools, poison, who may touch what when. Every call under the device's lock, but ``_died``."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections import deque
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ._simulated_clocks import Access, Clock, RaceError, joined
from ._simulated_memory import Block, poisoned, span
from ._simulated_queue import Host, Hosts, Mark, SimulatedEvent, SimulatedStream, Work

_REUSE = "reuse, its last reference died"


class ContractError(RuntimeError):
    """The caller broke a promise of ``Device`` that is not an order."""


@final
class Allocator:
    """Lends blocks, finds them by address, and checks each use of them.

    Attributes:
        races: every RaceError so far.
    """

    def __init__(self, hosts: Hosts, choices: random.Random) -> None:
        self.races: list[RaceError] = []
        self._hosts = hosts
        self._random = choices
        self._numbers = itertools.count()
        self._by_address: dict[int, Block] = {}
        self._pools: dict[SimulatedStream, list[Block]] = {}
        self._held_back: list[tuple[Block, list[SimulatedEvent], Clock]] = []  # died, and kept for other streams
        # Blocks that died and are not given back yet: a finalizer may run anywhere, also in the midst of our own code.
        self._dead: deque[tuple[Block, Host, Clock, Work | None]] = deque()
        self._dropping = threading.local()

    def __len__(self) -> int:
        """Blocks in existence."""
        return len(self._by_address)

    # ---- lend and take back ---------------------------------------------------------------------------------

    def empty(self, stream: SimulatedStream, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A block of ``stream``'s pool, else a fresh one."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(tuple(shape), dtype=dtype)
        self._release_kept()
        pool = self._pools.setdefault(stream, [])
        fitting = [block for block in pool if block.capacity >= nbytes]
        if fitting:
            block = self._random.choice(fitting)
            pool.remove(block)
        else:
            block = self._new("block", stream, nbytes)
            self._poison(block, {}, "allocation")
        return block.lend(shape, dtype, self._died)

    def pinned(self, nbytes: int) -> Tensor:
        """A fresh block that belongs to no stream."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return self._new("pinned block", None, nbytes).lend((nbytes,), torch.uint8, self._died)

    def find(self, tensor: Tensor) -> Block | None:
        """The block that ``tensor`` is lent from; None for memory that the device did not hand out."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def bury(self) -> None:
        """Give back the blocks that died. First in each call of the device, so that nothing is ordered before it by mistake."""
        while self._dead:
            block, host, clock, holder = self._dead.popleft()
            if holder is not None:
                raise ContractError(
                    f"{holder.name!r} held the last reference to {block.label} until it had run, so its death came too late: "
                    "let the launched function hold the tensor itself, not an object that holds it"
                )
            if block.home is None:
                del self._by_address[block.address]
                self._remember(block, Access(host.actor, 0, "freeing it", True, 0, block.capacity), clock)
            elif block.kept:
                self._held_back.append((block, [_mark(stream) for stream in block.kept], clock))
            else:
                self._give_back(block, clock)

    def drop(self, work: Work) -> None:
        """Let go of what ``work`` held. A block that dies by this died too late (see ``bury``)."""
        self._dropping.work, work.fn = work, None
        self._dropping.work = None

    def _new(self, label: str, home: SimulatedStream | None, nbytes: int) -> Block:
        block = Block(f"{label} {next(self._numbers)}", home, nbytes)
        self._by_address[block.address] = block
        return block

    def _died(self, block: Block) -> None:
        host = self._hosts.current()
        self._dead.append((block, host, host.clock, getattr(self._dropping, "work", None)))

    def _release_kept(self) -> None:
        waiting = []
        for block, events, clock in self._held_back:
            if all(event.passed_at is not None for event in events):
                self._give_back(block, joined(clock, *(event.clock for event in events)))
            else:
                waiting.append((block, events, clock))
        self._held_back = waiting

    def _give_back(self, block: Block, clock: Clock) -> None:
        self._poison(block, clock, _REUSE)
        assert block.home is not None
        self._pools[block.home].append(block)

    def _poison(self, block: Block, clock: Clock, why: str) -> None:
        stream = block.home
        assert stream is not None
        clock, time = stream.next(clock)
        self._remember(block, Access(stream.actor, time, why, True, 0, block.capacity), clock)
        stream.queue.append(Work("poison", block.fill, free=True))

    # ---- check each use -------------------------------------------------------------------------------------

    def touch(self, tensor: Tensor, clock: Clock, actor: str, time: int, what: str, write: bool) -> None:
        """``actor`` uses ``tensor`` at ``clock``. Raises RaceError, also kept in ``races``."""
        block = self.find(tensor)
        if block is not None and tensor.numel():
            self._remember(block, Access(actor, time, what, write, *span(tensor)), clock)

    def given(self, work: Work, tensor: Tensor, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Tensor:
        """What ``work``, launched with these lists, gets for ``tensor``: an alias that keeps nothing alive, or poison."""
        block = self.find(tensor)
        if block is None:
            return tensor
        written = any(self._overlap(block, tensor, other) for other in writes)
        listed = written or any(self._overlap(block, tensor, other) for other in reads)
        alias = block.alias(tensor) if listed else poisoned(tensor)
        if not written:
            work.read_only.append((alias, alias._version, block.label))
        return alias

    def check_read_only(self, work: Work) -> None:
        """Raise ContractError when ``work``, which has run, changed what it did not list under ``writes``."""
        for tensor, version, label in work.read_only:
            if tensor._version != version:
                raise ContractError(f"{work.name!r} changed {label}, which its launch did not list under writes")

    def _overlap(self, block: Block, a: Tensor, b: Tensor) -> bool:
        (start, stop), (other_start, other_stop) = span(a), span(b)
        return self.find(b) is block and start < other_stop and other_start < stop

    def _remember(self, block: Block, access: Access, clock: Clock) -> None:
        try:
            block.history.add(access, clock, block.label)
        except RaceError as race:
            self.races.append(race)
            raise


def _mark(stream: SimulatedStream) -> SimulatedEvent:
    """An event of the allocator's own, that no host ever waits for."""
    event = SimulatedEvent(None, f"end of keep on {stream}", timing=False, since=0.0)
    event.clock = stream.clock
    stream.queue.append(Mark(event))
    return event
