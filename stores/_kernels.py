"""CUDA kernels that move rows, and their launch. The only file that imports CuPy at run time, and only when asked.

Kernels are CUDA C++ (``_kernel_sources.py``) compiled by NVRTC on first use (CuPy caches the result), so one pure wheel
serves every torch.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ._kernel_arguments import check_launch, vector_bytes
from ._kernel_sources import FUNCTIONS, OPTIONS, SOURCES, THREADS

BLOCKS = 8  # enough to saturate the bus, and the other multiprocessors are left to the training step
GATHER_BLOCKS = 4  # keep 256 KiB in flight: more does not read faster, and what queues on the bus delays every launch
BOTH_WAYS = {"gather_blocks": 12, "scatter_blocks": 8}  # at once: 4 that read are crowded out by writes
INDEX_NAMES = {torch.int32: "int32", torch.int64: "int64"}


def available(device: torch.device) -> bool:
    """Whether kernels can run on ``device``: CUDA, and a CuPy that works beside this torch."""
    return device.type == "cuda" and why_unavailable() == ""


@functools.cache
def why_unavailable() -> str:
    """What is missing for kernels, and how to get it; empty when nothing is."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    extra = "cuda13" if (torch.version.cuda or "").startswith("13") else "cuda12"
    if importlib.util.find_spec("cupy") is None:
        return f'CuPy is not installed; pip install "rowferry[{extra}]"'
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a CuPy for another CUDA fails in ways of its own
        return f'CuPy does not work here ({error}); pip install "rowferry[{extra}]"'
    return ""


def cupy_over(tensor: Tensor, dtype: np.dtype[Any]) -> Any:
    """A CuPy array of ``dtype`` over page-locked host memory, no copy; it keeps the memory alive.

    Kernels on the current device read and write it over the bus.

    Raises:
        RuntimeError: there is no CUDA device. ImportError: CuPy is missing or does not work; the message names the extra.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("a CuPy array needs a CUDA device and torch sees none; use numpy() or torch() here")
    _require_cupy()
    import cupy

    if not tensor.nbytes:
        return cupy.empty(tuple(tensor.shape), dtype)
    return cupy.ndarray(tuple(tensor.shape), dtype, pointer_to(tensor))


def cupy_of(tensor: Tensor) -> Any:
    """A CuPy array over a CUDA tensor's memory, no copy; ready on CuPy's current stream. Raises as ``RowKernels``."""
    _require_cupy()
    import cupy

    return cupy.from_dlpack(tensor.detach())


def pointer_to(tensor: Tensor) -> Any:
    """A ``cupy.cuda.MemoryPointer`` to page-locked host memory, which it keeps alive. Raises as ``RowKernels``."""
    _require_cupy()
    import cupy

    # The device is named, else CuPy takes the one that locked the memory and warns of every other.
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), tensor.nbytes, tensor, torch.cuda.current_device())
    return cupy.cuda.MemoryPointer(memory, 0)


@final
class RowKernels:
    """Row copies on one CUDA device, on torch's current stream. Any thread.

    Compiled, loaded and run once at construction, so that no batch waits for a compiler; then cached for the device.
    Nothing is allocated and the host never waits. Tensors must stay alive until the stream has passed the launch.

    Args:
        gather_blocks, scatter_blocks: most thread blocks, of 512 threads, of a call that names no number.

    Raises:
        ImportError: CuPy is missing or does not work; the message names the extra.
    """

    def __init__(self, device: torch.device, *, gather_blocks: int = GATHER_BLOCKS, scatter_blocks: int = BLOCKS) -> None:
        _require_cupy()
        self._gather_blocks, self._scatter_blocks = gather_blocks, scatter_blocks
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._module = _module(self.device.index)

    def gather(
        self, out: Tensor, source: Tensor, rows: Tensor, *, places: Tensor | None = None, blocks: int | None = None
    ) -> None:
        """``out[i] = source[rows[i]]``, or ``out[places[i]]``, by bytes.

        Args:
            out: ``(k, *row_shape)`` on the device, contiguous.
            source: ``(n, *row_shape)``, contiguous, in page-locked host memory or on the device.
            rows: ``(k,)`` int32 or int64 on the device, in ``[0, n)``; the numbers are not checked.
            places: int64 ``(k,)`` on the device, distinct, in ``[0, len(out))``; not checked.
            blocks: most thread blocks, of 512 threads.

        Raises:
            TypeError: a tensor of another kind, shape, dtype or place than said here; nothing was launched.
        """
        blocks = self._gather_blocks if blocks is None else blocks
        self._launch("gather", source, out, source, out, rows, places, None, blocks)

    def scatter(
        self,
        target: Tensor,
        rows: Tensor,
        values: Tensor,
        *,
        places: Tensor | None = None,
        marks: Tensor | None = None,
        blocks: int | None = None,
    ) -> None:
        """``target[rows[i]] = values[i]``, or ``values[places[i]]``; rows are distinct. Arguments as for ``gather``.

        Args:
            target: ``(n, *row_shape)``, contiguous, in page-locked host memory or on the device.
            rows: ``(k,)``. Host memory holds the rows once an event after the launch has passed.
            values: ``(k, *row_shape)``, or more rows with ``places``.
            places: int64 ``(k,)`` on the device.
            marks: uint8 or bool ``(k,)`` on the device; rows with a zero are left as they are.
            blocks: most thread blocks, of 512 threads.

        Raises:
            TypeError: as for ``gather``.
        """
        blocks = self._scatter_blocks if blocks is None else blocks
        self._launch("scatter", values, target, target, values, rows, places, marks, blocks)

    def _launch(
        self,
        kind: str,
        source: Tensor,
        sink: Tensor,
        table: Tensor,
        values: Tensor,
        rows: Tensor,
        places: Tensor | None,
        marks: Tensor | None,
        blocks: int,
    ) -> None:
        check_launch(self.device, table, values, rows, places, marks, blocks)
        count = rows.shape[0]
        row_nbytes = math.prod(table.shape[1:]) * table.itemsize
        if not count or not row_nbytes:
            return
        vector = vector_bytes(source.data_ptr(), sink.data_ptr(), row_nbytes)
        self._module.launch(
            f"{kind}_{vector}_{INDEX_NAMES[rows.dtype]}",
            min(blocks, -(-count * (row_nbytes // vector) // THREADS)),
            source.data_ptr(), sink.data_ptr(), rows.data_ptr(), 0 if places is None else places.data_ptr(),
            0 if marks is None else marks.data_ptr(), count, row_nbytes // vector,
        )  # fmt: skip


def _require_cupy() -> None:
    if reason := why_unavailable():
        raise ImportError(reason)


def kernels(device: torch.device, source: str, functions: Mapping[str, Sequence[int]]) -> dict[str, Callable[..., None]]:
    """Kernels of somebody else's ``source``, compiled and loaded: ``launch(blocks, *arguments)`` on torch's current stream.

    Args:
        source: CUDA C++; its functions take pointers and ``long long`` numbers only.
        functions: names, and arguments with which a launch does nothing: it is made once, since CUDA loads code at its
            first launch.

    Raises:
        ImportError: CuPy is missing or does not work; the message names the extra.
    """
    _require_cupy()
    module = _module(torch.cuda.current_device() if device.index is None else device.index)
    module.add(source, functions)
    for name, nothing in functions.items():
        module.launch(name, 1, *nothing)
    return {name: functools.partial(module.launch, name) for name in functions}


@functools.cache
def _module(index: int) -> _Module:
    return _Module(index)


@final
class _Module:
    """All kernels of one device, loaded, and launched on torch's current stream with as little Python as can be."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._streams: dict[int, Any] = {}
        self._functions: dict[str, Any] = {}
        for name, source in SOURCES.items():
            self.add(source, FUNCTIONS[name])
        for function in self._functions:  # CUDA loads code at its first launch; these launches move no rows
            self.launch(function, 1, 0, 0, 0, 0, 0, 0, 1)

    def add(self, source: str, functions: Iterable[str]) -> None:
        """Compile ``source`` (CuPy keeps the result on disk) and load ``functions`` of it."""
        import cupy

        with torch.cuda.device(self._index):
            module = cupy.RawModule(code=source, options=OPTIONS)
            self._functions |= {function: module.get_function(function) for function in functions}

    def launch(self, function: str, blocks: int, *arguments: int) -> None:
        """Pointers and 64-bit numbers, on the stream that torch has current for this device in the calling thread."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.launch(function, blocks, *arguments)
            return
        pointer = torch.cuda.current_stream(self._index).cuda_stream
        stream = self._streams.get(pointer)
        if stream is None:
            stream = self._streams[pointer] = _cupy_stream(pointer)
        with stream:
            self._functions[function]((blocks,), (THREADS,), arguments)


def _cupy_stream(pointer: int) -> Any:
    """CuPy's view of a stream of torch. It owns nothing: a pointer that comes again is the same view."""
    import cupy

    if not hasattr(cupy.cuda.Stream, "from_external"):  # before CuPy 14
        return cupy.cuda.ExternalStream(pointer)
    return cupy.cuda.Stream.from_external(_StreamProtocol(pointer))


class _StreamProtocol:
    """What ``torch.cuda.Stream`` itself offers from torch 2.10 on."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer
