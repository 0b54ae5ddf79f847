"""The CUDA C++ of every kernel, and how it is compiled. Text only: ``_kernels.py`` launches it, a test compiles it for
architectures that the machine does not have.
"""

THREADS = 512  # a block; the launch bounds in the sources say the same
OPTIONS = ("--std=c++17",)
VECTORS = (1, 2, 4, 8, 16)  # bytes that a thread moves at once
INDEX_TYPES = ("int32", "int64")

# A loop of all threads of a grid over [0, n), for kernels that are not about rows' bytes.
EACH = r"""
#define EACH(i, n) \
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (long long)gridDim.x * blockDim.x)
"""

# Vectors of all rows are numbered through, row after row, and dealt to the threads: neighbours read neighbouring bytes,
# no lane idles whatever the width, one huge row is spread over the grid, and sorted rows are met in their order.
# Each thread keeps IN_FLIGHT vectors in flight, because the bus answers in microseconds: first all row numbers are
# asked for, then all vectors, then all are stored. Offsets are 64 bits wide.
ROWS_SOURCE = r"""
template <int BYTES> struct Vector;
template <> struct Vector<1> { typedef unsigned char type; };
template <> struct Vector<2> { typedef unsigned short type; };
template <> struct Vector<4> { typedef unsigned int type; };
template <> struct Vector<8> { typedef uint2 type; };
template <> struct Vector<16> { typedef uint4 type; };

// width: vectors of a row. places: where row i lies among the values; i itself when null. marks: 0 leaves a row out.
template <int BYTES, typename Index, bool SCATTER>
__device__ __forceinline__ void move_rows(const char* __restrict__ source, char* __restrict__ target,
                                          const Index* __restrict__ rows, const long long* __restrict__ places,
                                          const unsigned char* __restrict__ marks, long long count, long long width) {
    typedef typename Vector<BYTES>::type V;
    const int IN_FLIGHT = 8;
    const V* from = reinterpret_cast<const V*>(source);
    V* to = reinterpret_cast<V*>(target);
    const long long threads = (long long)gridDim.x * blockDim.x;
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long row_step = threads / width;
    const long long column_step = threads % width;
    long long at = thread / width;
    long long column = thread % width;
    while (at < count) {
        long long row[IN_FLIGHT], place[IN_FLIGHT], columns[IN_FLIGHT];
        bool wanted[IN_FLIGHT];
        #pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            wanted[k] = at < count;
            if (wanted[k]) {
                row[k] = (long long)rows[at];
                place[k] = places == nullptr ? at : places[at];
                wanted[k] = marks == nullptr || marks[at] != 0;
                columns[k] = column;
            }
            at += row_step;
            column += column_step;
            if (column >= width) {
                column -= width;
                ++at;
            }
        }
        V value[IN_FLIGHT];
        #pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k)
            if (wanted[k]) value[k] = from[(SCATTER ? place[k] : row[k]) * width + columns[k]];
        #pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k)
            if (wanted[k]) to[(SCATTER ? row[k] : place[k]) * width + columns[k]] = value[k];
    }
}

#define MOVER(NAME, BYTES, INDEX, SCATTER)                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                                \
    NAME(const char* source, char* target, const INDEX* rows, const long long* places,               \
         const unsigned char* marks, long long count, long long width) {                             \
        move_rows<BYTES, INDEX, SCATTER>(source, target, rows, places, marks, count, width);         \
    }
#define MOVERS(BYTES)                                        \
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
FUNCTIONS = {
    "rows": [f"{kind}_{bytes_}_{index}" for kind in ("gather", "scatter") for bytes_ in VECTORS for index in INDEX_TYPES]
}
