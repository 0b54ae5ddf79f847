"""The simulated device: late, in every order that the edges allow, and strict about the edges that are missing."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from rowferry.stores._device_contract import Event
from rowferry.stores.testing._simulated import SimulatedDevice
from rowferry.stores.testing._simulated_clocks import RaceError

POISON = 0xA5


def fill(device: SimulatedDevice, tensor: torch.Tensor, value: int, name: str = "fill") -> None:
    device.launch(name, lambda: tensor.fill_(value), writes=[tensor])


def read(device: SimulatedDevice, tensor: torch.Tensor, into: list[list[int]], name: str = "read") -> None:
    device.launch(name, lambda: into.append(tensor.tolist()), reads=[tensor])


def bytes_of(device: SimulatedDevice, n: int = 4) -> torch.Tensor:
    return device.empty((n,), torch.uint8)


# ---- order --------------------------------------------------------------------------------------------------


def test_nothing_runs_at_launch() -> None:
    device = SimulatedDevice()
    ran: list[int] = []
    device.launch("a", lambda: ran.append(1))
    assert ran == []
    device.drain()
    assert ran == [1]
    assert device.log == [("default", "a")]
    assert not device.step()


def test_work_of_one_stream_runs_in_launch_order_on_every_seed() -> None:
    for seed in range(20):
        device = SimulatedDevice(seed)
        ran: list[int] = []
        for i in range(5):
            device.launch(str(i), partial(ran.append, i))
            device.launch("other", lambda: None)
        device.drain()
        assert ran == [0, 1, 2, 3, 4]


def test_streams_without_an_edge_run_in_both_orders_and_with_one_in_one() -> None:
    def first_to_run(seed: int, edge: bool) -> str:
        device = SimulatedDevice(seed)
        a, b = device.stream("a"), device.stream("b")
        with device.use(a):
            device.launch("on a", lambda: None)
        if edge:
            device.wait(b, device.record(a))
        with device.use(b):
            device.launch("on b", lambda: None)
        device.drain()
        return device.log[0][0]

    assert {first_to_run(seed, edge=False) for seed in range(30)} == {"a", "b"}
    assert {first_to_run(seed, edge=True) for seed in range(30)} == {"a"}


def test_a_launch_takes_variables_as_they_are_at_launch() -> None:
    device = SimulatedDevice()
    ran: list[int] = []
    for i in range(3):
        device.launch("late", lambda: ran.append(i))  # noqa: B023
    device.drain()
    assert ran == [0, 1, 2]


def test_synchronize_runs_what_the_event_needs_and_now_and_then_more() -> None:
    more = set()
    for seed in range(30):
        device = SimulatedDevice(seed)
        a, b = device.stream("a"), device.stream("b")
        for stream in (a, b):
            with device.use(stream):
                device.launch("needed" if stream is a else "free", lambda: None)
        event = device.record(a)
        assert isinstance(event, Event)
        with device.use(a):
            device.launch("after", lambda: None)
        assert not event.query()
        event.synchronize()
        assert event.query()
        assert device.ran["needed"] == 1
        assert device.ran["after"] == 0  # the event passes before it, and the host goes on
        more.add(device.ran["free"])
    assert more == {0, 1}


def test_elapsed_time_counts_the_work_between_two_timed_events() -> None:
    device = SimulatedDevice()
    start = device.record(device.current(), timing=True)
    for _ in range(3):
        device.launch("a", lambda: None)
    end = device.record(device.current(), timing=True)
    with pytest.raises(ValueError, match="must be recorded with timing=True and have passed"):
        start.elapsed_time(end)
    device.drain()
    assert start.elapsed_time(end) == 3.0


def test_an_error_of_launched_work_rises_where_it_runs() -> None:
    device = SimulatedDevice()
    device.launch("bad", lambda: torch.zeros(2).view(3))
    with pytest.raises(RuntimeError, match="shape"):
        device.drain()


# ---- races --------------------------------------------------------------------------------------------------


def across_streams(seed: int, *, wait: bool) -> SimulatedDevice:
    """Write on one stream, read on another."""
    device = SimulatedDevice(seed)
    fetch, serve = device.stream("fetch"), device.stream("serve")
    with device.use(fetch):
        rows = bytes_of(device)
        device.label(rows, "slot 0")
        fill(device, rows, 7, "gather")
    event = device.record(fetch)
    if wait:
        device.wait(serve, event)
    seen: list[list[int]] = []
    with device.use(serve):
        read(device, rows, seen, "copy out")
    device.keep(rows, serve)
    device.drain()
    assert seen == [[7] * 4]
    return device


def test_a_missing_wait_is_a_race_on_every_seed_and_names_both_sides() -> None:
    for seed in range(10):
        across_streams(seed, wait=True)
        with pytest.raises(RaceError, match="race on slot 0") as race:
            across_streams(seed, wait=False)
        message = str(race.value)
        assert "'copy out' on stream serve reads bytes 0 to 4" in message
        assert "let stream serve wait for an event recorded on stream fetch after 'gather'" in message


def test_dropping_any_wait_or_record_is_found() -> None:
    calls: list[tuple[str, int, str]] = []

    def run(drop: tuple[str, int] | None) -> None:
        device = SimulatedDevice()

        def decide(kind: str, stream: object, event: object, number: int) -> bool:
            calls.append((kind, number, device.site()))
            return (kind, number) == drop

        device.drop = decide
        a, b = device.stream("a"), device.stream("b")
        with device.use(a):
            x = bytes_of(device)
            fill(device, x, 1)
        device.wait(b, device.record(a))
        with device.use(b):
            fill(device, x, 2)
        device.wait(a, device.record(b))
        with device.use(a):
            fill(device, x, 3)

    run(None)
    asked = list(calls)
    assert [(kind, number) for kind, number, _ in asked] == [("record", 0), ("wait", 0), ("record", 1), ("wait", 1)]
    assert all(__file__ in site for _, _, site in asked)
    assert len({site for _, _, site in asked}) == 2  # a record and its wait stand on one line here
    for kind, number, _ in asked:
        with pytest.raises(RaceError):
            run((kind, number))


def test_two_reads_or_two_ranges_are_no_race() -> None:
    device = SimulatedDevice()
    a, b = device.stream("a"), device.stream("b")
    with device.use(a):
        x = bytes_of(device, 8)
    device.wait(b, device.record(a))
    for stream, part in ((a, x[:4]), (b, x[4:])):
        with device.use(stream):
            fill(device, part, 1)
    device.wait(b, device.record(a))
    device.wait(a, device.record(b))
    for stream in (a, b):
        with device.use(stream):
            read(device, x, [])
    with device.use(b), pytest.raises(RaceError, match="writes bytes 3 to 5"):
        fill(device, x[3:5], 1)
    assert len(device.races) == 1


def test_order_travels_over_a_third_stream() -> None:
    device = SimulatedDevice()
    a, b, c = (device.stream(name) for name in "abc")
    with device.use(a):
        x = bytes_of(device)
        fill(device, x, 1)
    device.wait(b, device.record(a))
    device.wait(c, device.record(b))
    with device.use(c):
        fill(device, x, 2)


def test_a_host_must_see_the_event_before_it_reads_or_reuses_pinned_memory() -> None:
    device = SimulatedDevice()
    chunk = device.pinned(4)
    rows = bytes_of(device)
    device.copy(chunk, rows)
    event = device.record(device.current())
    with pytest.raises(RaceError, match="let host MainThread synchronize with an event"):
        device.host_reads(chunk)
    assert not event.query()
    with pytest.raises(RaceError):
        device.host_writes(chunk)
    event.synchronize()
    device.host_reads(chunk)
    device.host_writes(chunk)
    device.copy(rows, chunk)  # a launch comes after all that its host did


def test_pinned_memory_that_dies_under_a_pending_copy_is_a_race() -> None:
    device = SimulatedDevice()
    chunk = device.pinned(4)
    rows = bytes_of(device)
    device.copy(rows, chunk)
    del chunk
    with pytest.raises(RaceError, match="'freeing it' on host MainThread"):
        device.drain()


def test_two_hosts_are_ordered_by_a_lock_that_both_take() -> None:
    for locked in (True, False):
        device = SimulatedDevice()
        lock = device.lock()
        chunk = device.pinned(4)
        with device.host("producer"):
            device.host_writes(chunk)
            if locked:
                with lock:
                    assert lock.locked()
        with device.host("consumer"):
            with lock:
                pass
            if locked:
                device.host_writes(chunk)
            else:
                with pytest.raises(RaceError, match="take a lock that host producer released"):
                    device.host_writes(chunk)


def test_a_lock_of_the_device_carries_a_condition_between_threads() -> None:
    device = SimulatedDevice()
    ready = threading.Condition(device.lock())  # type: ignore[arg-type]
    chunk = device.pinned(4)
    done: list[bool] = []

    def producer() -> None:
        device.enter_thread()
        device.host_writes(chunk)
        with ready:
            done.append(True)
            ready.notify()

    thread = threading.Thread(target=producer)
    with ready:
        thread.start()
        assert ready.wait_for(lambda: bool(done), timeout=30)
    device.host_writes(chunk)
    thread.join()
    assert device.races == []
