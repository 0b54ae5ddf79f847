"""Exactness: a random program run through a pipeline on a simulated device, beside the plain loop "read, step, write"."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowferry.pipeline.loader import Pipeline
from rowferry.stores import ArrayStore, Store
from rowferry.stores.testing import FailingStore, SimulatedDevice

from ._host import SimulatedHost
from ._judges import set_movers
from ._programs import Outcome as Outcome
from ._programs import Program as Program
from ._programs import Setting as Setting
from ._programs import draw_program as draw_program
from ._programs import draw_setting as draw_setting
from ._programs import make_stores as make_stores
from ._programs import plain_loop as plain_loop


def run_pipeline(program: Program, setting: Setting, seed: int, device: SimulatedDevice | None = None) -> Outcome:
    """The same through a pipeline whose producer, writer and streams run in an order that ``seed`` decides."""
    device = device or SimulatedDevice(seed)
    rng = random.Random(seed)
    memories = make_stores(program.rows)
    outcome = Outcome(stores=memories)
    source: dict[str, Store] = {"a": ArrayStore(memories[0]), "b": ArrayStore(memories[1])}
    mover = setting.mover
    if program.bad_row is not None or program.failing_writes:
        mover = "copy"  # only host threads meet errors of a store
        bad = () if program.bad_row is None else (program.bad_row,)
        source["a"] = FailingStore(source["a"], OSError("the disk is on fire"), rows=bad, writes=program.failing_writes)
    streams = [device.current(), *(device.stream(f"user {k}") for k in range(1, setting.streams))]
    with device.use(streams[0]):
        pipe = Pipeline(
            source,
            batch_sampler=_Labelled(program, device) if program.labelled else [np.array(b, np.int64) for b in program.batches],
            index="rows" if program.labelled else None,
            device=device,  # type: ignore[arg-type]  # a simulated device is taken as it is
            lookahead=setting.lookahead,
            depth=setting.depth,
            mover="copy",
            writable=setting.writable,
            staging_bytes=(1 if setting.lookahead == 0 else setting.depth) * (setting.slot_rows // 8 * 256 * 4),
        )
    set_movers(pipe, mover, seed)
    host = SimulatedHost(device, seed + 1)
    if setting.lookahead:
        pipe._new_host = lambda: host
    with pipe:
        _consume(pipe, program, setting, device, host, rng, streams, outcome)
    device.drain()
    if device.races:
        raise device.races[0]
    if host.escaped:
        raise host.escaped[0]
    return outcome


class _Labelled:
    """The program's batches as items; each label is made on the stream that is current when it is drawn."""

    def __init__(self, program: Program, device: SimulatedDevice) -> None:
        self._program, self._device = program, device

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(self._program.batches):
            label = self._device.empty((2,), torch.int64)
            _fill(self._device, label, number)
            yield {"rows": np.array(batch, np.int64), "label": label}
            del label


def _fill(device: SimulatedDevice, label: Tensor, number: int) -> None:
    device.launch("label", lambda: label.fill_(number), writes=[label])


def _consume(
    pipe: Pipeline,
    program: Program,
    setting: Setting,
    device: SimulatedDevice,
    host: SimulatedHost,
    rng: random.Random,
    streams: Sequence[Any],
    outcome: Outcome,
) -> None:
    iterator = iter(pipe)
    for number in range(program.good_batches + 1):
        host.pause()
        if program.stop_after is not None and number >= program.stop_after:
            return
        # The user changes streams between batches without a word: ordering that is the pipeline's business.
        stream = rng.choice(streams)
        with device.use(stream):
            batch = _retried(lambda: next(iterator, None), program, number)
            if batch is None:
                return
            host.pause()
            _step(batch, number, program, device, outcome, setting, rng.choice(streams))
            del batch
            host.pause()
            if number in program.flushed:
                _retried(pipe.flush, program, -1)
                _check_flushed(program, number, outcome)


def _retried(call: Callable[[], Any], program: Program, number: int) -> Any:
    """``call`` until a failing write has been tried again; None where the row that cannot be read ends the epoch."""
    for _ in range(2 * len(program.failing_writes) + 1):
        try:
            return call()
        except OSError as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            if "fetching" in notes and program.bad_row is not None and number == program.good_batches:
                return None
            if "writing" not in notes:
                raise
    raise AssertionError("a write that fails once was not tried again")


def _step(
    batch: Any, number: int, program: Program, device: SimulatedDevice, outcome: Outcome, setting: Setting, other: Any
) -> None:
    if program.labelled:
        _check_label(batch.item["label"], number, device)
    if not setting.writable:
        _note(outcome, device, batch.data["a"], batch.data["b"])
        return
    first, second = batch.values["a"], batch.values["b"]
    _note(outcome, device, first, second)
    if number not in program.written:
        return
    if number in program.partly:
        here = device.current()
        with device.use(other):  # new values may come from any stream
            new = device.empty(tuple(first.shape), first.dtype)
            device.wait(other, device.record(here))
            if new.numel():
                device.launch("step", lambda: new.copy_(first * 2 + number), reads=[first], writes=[new])
                device.keep(first, other)
            device.wait(here, device.record(other))
        batch.write_back({"a": new})
        del new  # its memory may be lent again at once
        return
    if first.numel():
        device.launch("step", lambda: first.copy_(first * 2 + number), reads=[first], writes=[first])
        device.launch("step", lambda: second.sub_(number), reads=[second], writes=[second])
    batch.write_back()


def _check_label(label: Tensor, number: int, device: SimulatedDevice) -> None:
    def check() -> None:
        if label.tolist() != [number, number]:
            raise AssertionError(f"the label of batch {number} is {label.tolist()}")

    device.launch("check label", check, reads=[label])


def _note(outcome: Outcome, device: SimulatedDevice, first: Tensor, second: Tensor) -> None:
    """What the batch holds when the consumer's stream gets there."""
    slot: list[Tensor] = [torch.empty(tuple(first.shape)), torch.empty(tuple(second.shape), dtype=torch.int64)]
    outcome.served.append((slot[0], slot[1]))
    if first.numel():
        device.launch("note", lambda: slot[0].copy_(first), reads=[first])
        device.launch("note", lambda: slot[1].copy_(second), reads=[second])


def _check_flushed(program: Program, number: int, outcome: Outcome) -> None:
    """After flush() the stores are what the plain loop has after that batch."""
    so_far = Program(program.rows, program.batches[: number + 1], program.written, program.partly)
    for mine, plain in zip(outcome.stores, plain_loop(so_far).stores, strict=True):
        if not torch.equal(mine, plain):
            raise AssertionError(f"after flush() at batch {number} the store is {mine.tolist()}, not {plain.tolist()}")


def require_equal(program: Program, setting: Setting, found: Outcome) -> None:
    """Every served batch and the final stores, bit for bit."""
    wanted = plain_loop(program)
    if len(found.served) != len(wanted.served):
        raise AssertionError(f"{len(found.served)} batches were served, not {len(wanted.served)}; {program} {setting}")
    for number, (mine, plain) in enumerate(zip(found.served, wanted.served, strict=True)):
        if not setting.writable:
            index = torch.tensor(program.batches[number], dtype=torch.int64)
            stores = make_stores(program.rows)
            plain = (stores[0][index], stores[1][index])
        for column, name in enumerate("ab"):
            if not torch.equal(mine[column], plain[column]):
                raise AssertionError(
                    f"batch {number} column {name} is {mine[column].tolist()}, not {plain[column].tolist()}; "
                    f"{program} {setting}"
                )
    for name, mine_all, plain_all in zip("ab", found.stores, wanted.stores, strict=True):
        if not torch.equal(mine_all, plain_all):
            raise AssertionError(f"store {name} ends as {mine_all.tolist()}, not {plain_all.tolist()}; {program} {setting}")
