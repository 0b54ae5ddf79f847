"""CUDA kernels that move rows, and their launch. The only file that imports CuPy at run time, and only when asked.

Kernels are CUDA C++ compiled by NVRTC on first use (CuPy caches the result), so one pure wheel serves every torch.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Literal, final

import torch
from torch import Tensor

THREADS = 512
BLOCKS = 8  # saturate the bus for rows of 512 bytes and more, and leave the other multiprocessors to the training step

# A group of lanes copies one row; several rows are in flight in each group, because the bus answers in microseconds.
# A row's offset is 64 bits wide: row number and row size are multiplied as long long.
ROWS_SOURCE = r"""
template <int BYTES> struct Vector;
template <> struct Vector<1> { typedef unsigned char type; };
template <> struct Vector<2> { typedef unsigned short type; };
template <> struct Vector<4> { typedef unsigned int type; };
template <> struct Vector<8> { typedef uint2 type; };
template <> struct Vector<16> { typedef uint4 type; };

// lanes: threads of a group, a power of two up to 32. width: vectors of a row.
template <int BYTES, typename Index, bool SCATTER>
__device__ __forceinline__ void move_rows(const char* __restrict__ source, char* __restrict__ target,
                                          const Index* __restrict__ rows, const long long* __restrict__ places,
                                          const unsigned char* __restrict__ marks, long long count, long long width,
                                          int lanes) {
    typedef typename Vector<BYTES>::type V;
    const int IN_FLIGHT = 8;
    const long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long group = thread / lanes;
    const long long groups = (long long)gridDim.x * blockDim.x / lanes;
    const int lane = (int)(thread % lanes);
    for (long long first = group; first < count; first += groups * IN_FLIGHT) {
        const V* from[IN_FLIGHT];
        V* to[IN_FLIGHT];
        #pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const long long at = first + k * groups;
            bool wanted = at < count && (marks == nullptr || marks[at] != 0);
            long long row = 0, place = 0;
            if (wanted) {
                row = (long long)rows[at];
                place = places == nullptr ? at : places[at];
            }
            from[k] = reinterpret_cast<const V*>(source) + (SCATTER ? place : row) * width;
            to[k] = wanted ? reinterpret_cast<V*>(target) + (SCATTER ? row : place) * width : nullptr;
        }
        for (long long column = lane; column < width; column += lanes) {
            V value[IN_FLIGHT];
            #pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k)
                if (to[k] != nullptr) value[k] = from[k][column];
            #pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k)
                if (to[k] != nullptr) to[k][column] = value[k];
        }
    }
}

#define MOVER(NAME, BYTES, INDEX, SCATTER)                                                                        \
    extern "C" __global__ void __launch_bounds__(512)                                                             \
    NAME(const char* source, char* target, const INDEX* rows, const long long* places,                            \
         const unsigned char* marks, long long count, long long width, int lanes) {                               \
        move_rows<BYTES, INDEX, SCATTER>(source, target, rows, places, marks, count, width, lanes);               \
    }
#define MOVERS(BYTES)                                  \
    MOVER(gather_##BYTES##_int32, BYTES, int, false)         \
    MOVER(gather_##BYTES##_int64, BYTES, long long, false)   \
    MOVER(scatter_##BYTES##_int32, BYTES, int, true)         \
    MOVER(scatter_##BYTES##_int64, BYTES, long long, true)
MOVERS(1)
MOVERS(2)
MOVERS(4)
MOVERS(8)
MOVERS(16)
"""

SOURCES = {"rows": ROWS_SOURCE}
OPTIONS = ("--std=c++17",)


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


@final
class RowKernels:
    """Row copies on one CUDA device, on torch's current stream. Any thread.

    Compiled and loaded at construction, so that no batch waits for a compiler.

    Raises:
        ImportError: CuPy is missing or does not work; the message names the extra.
    """

    def __init__(self, device: torch.device) -> None:
        if reason := why_unavailable():
            raise ImportError(reason)
        self._functions = _load(device.index if device.index is not None else torch.cuda.current_device())

    def gather(
        self, out: Tensor, source: Tensor, rows: Tensor, *, places: Tensor | None = None, blocks: int = BLOCKS
    ) -> None:
        """``out[i] = source[rows[i]]``, or ``out[places[i]]``, by bytes.

        Args:
            out: ``(k, *row_shape)`` on the device, contiguous.
            source: ``(n, *row_shape)``, contiguous, in pinned host memory or on the device.
            rows: ``(k,)`` int32 or int64 on the device, in ``[0, n)``; not checked.
            places: int64 ``(k,)`` on the device, distinct.
            blocks: thread blocks, of 512 threads.
        """
        self._launch("gather", source, out, rows, places, None, blocks)

    def scatter(
        self,
        target: Tensor,
        rows: Tensor,
        values: Tensor,
        *,
        places: Tensor | None = None,
        marks: Tensor | None = None,
        blocks: int = BLOCKS,
    ) -> None:
        """``target[rows[i]] = values[i]``, or ``values[places[i]]``; rows are distinct.

        Args:
            target: ``(n, *row_shape)``, contiguous, in pinned host memory or on the device.
            places: int64 ``(k,)`` on the device.
            marks: uint8 ``(k,)`` on the device; rows with a zero are left as they are.
        """
        self._launch("scatter", values, target, rows, places, marks, blocks)

    def _launch(
        self,
        kind: Literal["gather", "scatter"],
        source: Tensor,
        target: Tensor,
        rows: Tensor,
        places: Tensor | None,
        marks: Tensor | None,
        blocks: int,
    ) -> None:
        count = rows.numel()
        row_nbytes = source[0].numel() * source.element_size() if source.shape[0] else 0
        if not count or not row_nbytes:
            return
        vector = vector_bytes(source.data_ptr(), target.data_ptr(), row_nbytes)
        width = row_nbytes // vector
        lanes = min(32, 1 << (width - 1).bit_length())
        function = self._functions[kind, vector, rows.dtype]
        stream = torch.cuda.current_stream(rows.device).cuda_stream
        function(stream, blocks, (
            source.data_ptr(), target.data_ptr(), rows.data_ptr(), places.data_ptr() if places is not None else 0,
            marks.data_ptr() if marks is not None else 0, count, width, lanes,
        ))  # fmt: skip


def vector_bytes(*divided: int) -> int:
    """The widest vector (16, 8, 4, 2 or 1 bytes) that divides all addresses and sizes."""
    combined = 16
    for number in divided:
        combined |= number
    return combined & -combined


@functools.cache
def _load(index: int) -> dict[Any, Any]:
    """Compiled kernels of one device, as callables ``(stream pointer, blocks, arguments)``."""
    import cupy
    import numpy as np

    with cupy.cuda.Device(index):
        module = cupy.RawModule(code=ROWS_SOURCE, options=OPTIONS)
        functions = {}
        for kind in ("gather", "scatter"):
            for vector in (1, 2, 4, 8, 16):
                for dtype, name in ((torch.int32, "int32"), (torch.int64, "int64")):
                    functions[kind, vector, dtype] = _caller(cupy, np, module.get_function(f"{kind}_{vector}_{name}"))
        return functions


def _caller(cupy: Any, np: Any, kernel: Any) -> Any:
    def call(stream: int, blocks: int, arguments: tuple[int, ...]) -> None:
        source, target, rows, places, marks, count, width, lanes = arguments
        with cupy.cuda.ExternalStream(stream):
            kernel(
                (blocks,),
                (THREADS,),
                (
                    np.uintp(source), np.uintp(target), np.uintp(rows), np.uintp(places), np.uintp(marks),
                    np.int64(count), np.int64(width), np.int32(lanes),
                ),
            )  # fmt: skip

    return call
