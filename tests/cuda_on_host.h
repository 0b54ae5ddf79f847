// What the package's CUDA sources use of CUDA, for a C++ compiler of the host: a block's threads are threads, which meet at
// __syncthreads as on a device; blocks run one after the other. Slow, and only for tests.
#include <barrier>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Place { unsigned x; };
static thread_local Place blockIdx, threadIdx;
static Place gridDim, blockDim;
static std::barrier<>* together;

static void __syncthreads() { together->arrive_and_wait(); }

template <typename T> static T atomicAdd(T* at, T more) { return __atomic_fetch_add(at, more, __ATOMIC_RELAXED); }

template <typename T> static T atomicMax(T* at, T other) {
    T held = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (held < other && !__atomic_compare_exchange_n(at, &held, other, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return held;
}

// kernel<<<blocks, threads>>>(arguments...): pointers and numbers of 64 bits each.
template <typename... A, std::size_t... I>
static void run(void (*kernel)(A...), int blocks, int threads, const long long* arguments, std::index_sequence<I...>) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (int block = 0; block < blocks; ++block) {
        std::barrier<> all(threads);
        together = &all;
        std::vector<std::thread> running;
        for (int thread = 0; thread < threads; ++thread)
            running.emplace_back([=] {
                blockIdx.x = block;
                threadIdx.x = thread;
                kernel((A)arguments[I]...);
            });
        for (auto& each : running) each.join();
    }
}

template <typename... A> static void run(void (*kernel)(A...), int blocks, int threads, const long long* arguments) {
    run(kernel, blocks, threads, arguments, std::index_sequence_for<A...>());
}

#define LAUNCHER(KERNEL) \
    extern "C" void run_##KERNEL(int blocks, int threads, const long long* arguments) { run(KERNEL, blocks, threads, arguments); }
