"""CUDA and the CPU under one contract; the only file that names ``torch.cuda``."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor
from torch import dtype as Dtype  # a device has an attribute "torch", which hides the module in annotations

from ._device_contract import Device
from ._recycled import LARGE, Recycler

_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED of cuda.h


def default_device() -> torch.device:
    """The current CUDA device if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """``device`` with its index; the default when None.

    Raises:
        ValueError: neither a CPU nor a CUDA device, or one that this machine does not have.
    """
    if device is None:
        return default_device()
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise ValueError(f"device {wanted} is not supported; use 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device {wanted} was asked for, but torch sees no CUDA device; 'rowferry doctor' tells what is missing"
        )
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device {wanted} was asked for; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return torch.device("cuda", index)


def cuda_facts(device: torch.device) -> dict[str, str | int]:
    """``name``, ``uuid`` (NVML's, without the GPU- before it), ``compute_capability`` and ``memory_bytes`` of a device."""
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "uuid": str(found.uuid),
        "compute_capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
    }


def device_for(device: torch.device | str | int | None) -> Device:
    """The device object that the pipeline drives."""
    wanted = resolve_device(device)
    return CudaDevice(wanted) if wanted.type == "cuda" else CpuDevice()


@final
class _Passed:
    """An event of a device that runs everything at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        del end
        return 0.0


PASSED = _Passed()
_RECYCLER = Recycler()  # of the CPU's large tensors, for the whole process


@final
class _Moment:
    """An event with timing of a device that runs everything at once: the moment when it was recorded."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Moment) -> float:
        return (end._at - self._at) * 1e3


@final
class CpuDevice:
    """The CPU: every launch runs at once in the calling thread, so streams and events order nothing."""

    torch = torch.device("cpu")
    is_cuda = False
    asynchronous = False

    def stream(self, name: str, *, high_priority: bool = False) -> Any:
        del high_priority
        return name

    def current(self) -> Any:
        return "cpu"

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        del stream
        return contextlib.nullcontext()

    def record(self, stream: Any, *, timing: bool = False) -> _Passed | _Moment:
        del stream
        return _Moment() if timing else PASSED

    def recycle(self, event: Any) -> None:
        del event

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, stream: Any, event: Any) -> None:
        del stream, event

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        with torch.inference_mode(False):
            if nbytes >= LARGE:
                return _RECYCLER.empty(nbytes).view(dtype).view(tuple(shape))
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def pinned(self, nbytes: int) -> Tensor:
        return self.empty((nbytes,), torch.uint8)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        del tensor, stream

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cpu

    def launch(self, name: str, fn: Callable[[], Any], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        del name, reads, writes
        fn()

    def copy(self, out: Tensor, source: Tensor) -> None:
        out.copy_(source)

    def host_reads(self, tensor: Tensor) -> None:
        del tensor

    def host_writes(self, tensor: Tensor) -> None:
        del tensor

    def free_bytes(self) -> int:
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                fields = dict(line.split(":", 1) for line in lines)
            return int(fields["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            return 4 << 30  # not Linux: assume a small machine rather than a large one

    def link_rate(self) -> None:
        return None

    def capturing(self) -> bool:
        return False

    def enter_thread(self) -> None:
        pass


@final
class CudaDevice:
    """One CUDA device, through torch's streams, events and allocator."""

    is_cuda = True
    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self._streams: dict[int, torch.cuda.Stream] = {}  # torch's objects by handle: making one costs ten microseconds
        self._timers: deque[torch.cuda.Event] = deque()  # recycled; any thread appends and pops

    def stream(self, name: str, *, high_priority: bool = False) -> torch.cuda.Stream:
        del name
        priority = -1 if high_priority else 0
        return torch.cuda.Stream(self.torch, priority=priority)  # type: ignore[no-untyped-call, unused-ignore]

    def current(self) -> torch.cuda.Stream:
        handle: int = torch._C._cuda_getCurrentRawStream(self.torch.index)
        found = self._streams.get(handle)
        if found is None:
            found = self._streams[handle] = torch.cuda.current_stream(self.torch)
        return found

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        here = torch.cuda.current_device() == self.torch.index
        return torch.cuda.stream(stream) if here else self._use_from_another_device(stream)

    @contextlib.contextmanager
    def _use_from_another_device(self, stream: Any) -> Iterator[None]:
        with torch.cuda.device(self.torch), torch.cuda.stream(stream):  # a stream alone opens a context where it goes back to
            yield

    def record(self, stream: Any, *, timing: bool = False) -> torch.cuda.Event:
        try:
            event = self._timers.popleft() if timing else None
        except IndexError:
            event = None
        if event is None:
            event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call, unused-ignore]
        event.record(stream)
        return event

    def recycle(self, event: Any) -> None:
        self._timers.append(event)

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, stream: Any, event: Any) -> None:
        if event is not PASSED:
            stream.wait_event(event)

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype, device=self.torch)

    def pinned(self, nbytes: int) -> Tensor:
        from ._pinning import pinned_bytes  # page-locking is built on this file's resolve_device

        with torch.cuda.device(self.torch):  # else it would open a context on the device that is current, which may be another
            return pinned_bytes(nbytes)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch

    def launch(self, name: str, fn: Callable[[], Any], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        del name, reads, writes
        fn()

    def copy(self, out: Tensor, source: Tensor) -> None:
        out.copy_(source, non_blocking=True)

    def host_reads(self, tensor: Tensor) -> None:
        del tensor

    def host_writes(self, tensor: Tensor) -> None:
        del tensor

    def free_bytes(self) -> int:
        free, _total = torch.cuda.mem_get_info(self.torch)
        held = torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)
        return free + held

    def link_rate(self) -> float:
        from ._link import link_rate

        return link_rate(self)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch)
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        # Without this, cudaMalloc or an event query in our thread would break a capture in the user's.
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
