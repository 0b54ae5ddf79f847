"""Where a table can live, what a step costs there, and the call that puts it there. Pure: told everything, asks nothing.

A row is its weight and its optimizer state: r = w + s bytes. A step asks for B ids, of which u = distinct x B are
different; so it reads u r bytes and, when training, writes u r bytes. With bandwidths in bytes a second:

    device   D = 2 B w / m  (lookup)  and when training  + 2 B w / m  (gradients summed by row)
                                                          + 2 u (r + w) / m  (the optimizer: rows, state, gradient)
    gpu      D + 2 u r / m, and 2 u r / m for putting rows back: rows are gathered and scattered in the device's own memory
    pinned   max(D + the same, u r / link in + u r / link out): the transfer is hidden by compute, or hides it; the two
             directions are taken in turns, which is the careful assumption
    memmap   max(D + the same, u r / l + u r / l'), l the slower of link and host threads; host threads reach h / 2, since
             a gather reads and writes h; where the file does not fit in memory beside what is used, they reach the disk

m and h are the memory bandwidths of device and host, bytes read and written both counted. Without a GPU, m = h and nothing
crosses: pinned memory and files in memory cost what "gpu" costs. A bandwidth that is not known makes the time unknown.
The model's own compute comes on top of D and is not known here; a longer D hides more.
"""

from __future__ import annotations

from typing import NamedTuple

SPARE = 0.9  # of free memory or disk may be taken by the table


class Table(NamedTuple):
    """What is to be placed. ``weight_bytes`` and ``state_bytes`` are a row's; state is 0 for a table that is only read."""

    rows: int
    weight_bytes: int
    state_bytes: int
    batch: int
    distinct: float
    trains: bool

    @property
    def row_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def moved(self) -> float:
        """Bytes of the rows of a step, one way."""
        return self.distinct * self.batch * self.row_bytes


class Machine(NamedTuple):
    """Free bytes, and GB/s (1e9 bytes); None where not known. ``link_*`` and ``device_*`` None without a GPU."""

    gpu: bool
    device_free: int | None
    host_free: int | None
    disk_free: int | None
    link_in: float | None
    link_out: float | None
    device_bandwidth: float | None
    host_bandwidth: float | None
    disk_bandwidth: float | None


class Placement(NamedTuple):
    """``fits``: None where the room is not known. ``ms``: of a step, None where a bandwidth is not known; ``why`` says so."""

    name: str
    where: str
    needs: int
    room: int | None
    fits: bool | None
    ms: float | None
    why: str


def placements(table: Table, machine: Machine) -> list[Placement]:
    """All of them, in the order GPU, pinned memory, disk."""
    return [_gpu(table, machine), _pinned(table, machine), _memmap(table, machine)]


def fastest(found: list[Placement]) -> Placement | None:
    """The one that fits and has the least expected time, the first of equals; None where none is known to fit.

    Where no time is known, the first that fits.
    """
    fitting = [each for each in found if each.fits]
    timed = [each for each in fitting if each.ms is not None]
    if timed:
        return min(timed, key=lambda each: each.ms or 0.0)
    return fitting[0] if fitting else None


def device_ms(table: Table, bandwidth: float | None) -> float | None:
    """D and the moves of rows inside the device, in ms; None where its bandwidth is not known."""
    if bandwidth is None:
        return None
    lookups = 2 * table.batch * table.weight_bytes
    work = lookups + 2 * table.moved  # rows are gathered
    if table.trains:
        rows_and_gradient = table.distinct * table.batch * (table.row_bytes + table.weight_bytes)
        work += lookups + 2 * rows_and_gradient + 2 * table.moved  # gradients, optimizer, rows are put back
    return 1e3 * work / (bandwidth * 1e9)


def _gpu(table: Table, machine: Machine) -> Placement:
    if not machine.gpu:
        return Placement("gpu", "GPU memory", table.nbytes, None, False, None, "there is no GPU")
    return _placed("gpu", "GPU memory", table, machine.device_free, *_inside(table, machine))


def _pinned(table: Table, machine: Machine) -> Placement:
    if not machine.gpu:
        return _placed("pinned", "host memory", table, machine.host_free, *_inside(table, machine))
    ms, why = _beside(table, machine, machine.link_in, machine.link_out, "the link")
    return _placed("pinned", "pinned host memory", table, machine.host_free, ms, why)


def _memmap(table: Table, machine: Machine) -> Placement:
    where = "a .npy on disk"
    if machine.host_free is not None and table.nbytes <= SPARE * machine.host_free:
        if machine.gpu:
            threads = None if machine.host_bandwidth is None else machine.host_bandwidth / 2
            ways = (_slower(machine.link_in, threads), _slower(machine.link_out, threads))
            ms, why = _beside(table, machine, *ways, "host threads or the link")
        else:
            ms, why = _inside(table, machine)
        return _placed("memmap", where, table, machine.disk_free, ms, f"{why}, once in memory")
    disk = machine.disk_bandwidth
    if disk is None:
        why = "it does not fit in memory, and the disk's speed is not known: pass --disk-bandwidth"
        return _placed("memmap", where, table, machine.disk_free, None, why)
    ways = (_slower(machine.link_in, disk), _slower(machine.link_out, disk)) if machine.gpu else (disk, disk)
    return _placed("memmap", where, table, machine.disk_free, *_beside(table, machine, *ways, "the disk or the link"))


def _inside(table: Table, machine: Machine) -> tuple[float | None, str]:
    """Milliseconds of a step whose rows cross nothing, and a word on it."""
    ms = device_ms(table, machine.device_bandwidth if machine.gpu else machine.host_bandwidth)
    return ms, "nothing crosses" if ms is not None else "the memory's bandwidth is not known"


def _beside(table: Table, machine: Machine, way_in: float | None, way_out: float | None, by: str) -> tuple[float | None, str]:
    """Milliseconds of a step whose rows come and go at these GB/s beside the device's work, and what limits it."""
    inside, _ = _inside(table, machine)
    if inside is None or way_in is None or way_out is None:
        return None, f"the speed of {by}, or of the device's memory, is not known"
    transfer = 1e3 * (table.moved / way_in + (table.moved / way_out if table.trains else 0)) / 1e9
    return max(inside, transfer), by if transfer >= inside else "the device's memory; the transfer is hidden"


def _slower(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else min(first, second)


def _placed(name: str, where: str, table: Table, room: int | None, ms: float | None, why: str) -> Placement:
    fits = None if room is None else table.nbytes <= SPARE * room
    return Placement(name, where, table.nbytes, room, fits, ms, why)
