// What a CUDA kernel of cupy needs to be a function of g++'s. Blocks run one after another. Where the threads of a block
// wait for each other (SYNC), each is a fiber; otherwise they run one after another too.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __restrict__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define warpSize 32

struct Place { unsigned x = 1, y = 1, z = 1; };
static thread_local Place threadIdx, blockIdx, blockDim, gridDim;

// --- functions that CUDA has, and only for the types that it has ---
using std::abs; using std::floor; using std::fmod; using std::isfinite; using std::isinf; using std::isnan;
using std::signbit;
template <class A, class B> auto min(A a, B b) { typedef typename std::common_type<A, B>::type C; return C(a) < C(b) ? C(a) : C(b); }
template <class A, class B> auto max(A a, B b) { typedef typename std::common_type<A, B>::type C; return C(a) > C(b) ? C(a) : C(b); }
template <class To, class From> To bits_as(From value) { To to; std::memcpy(&to, &value, sizeof to); return to; }
inline double __longlong_as_double(long long value) { return bits_as<double>(value); }
inline long long __double_as_longlong(double value) { return bits_as<long long>(value); }
inline float __int_as_float(int value) { return bits_as<float>(value); }
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value ? __builtin_clz(value) : 32; }
inline int __clzll(long long value) { return value ? __builtin_clzll(value) : 64; }
inline void __threadfence() {}
#define ATOMIC(T) \
  inline T atomicExch(T* at, T to) { T was = *at; *at = to; return was; }
#define ATOMIC_INTEGER(T) \
  ATOMIC(T) \
  inline T atomicAdd(T* at, T by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); } \
  inline T atomicMax(T* at, T to) { T was = *at; *at = was > to ? was : to; return was; } \
  inline T atomicMin(T* at, T to) { T was = *at; *at = was < to ? was : to; return was; } \
  inline T atomicCAS(T* at, T from, T to) { T was = *at; if (was == from) *at = to; return was; }
ATOMIC_INTEGER(int)
ATOMIC_INTEGER(unsigned)
ATOMIC(float)
inline float atomicAdd(float* at, float by) { float was = *at; *at = was + by; return was; }
inline double atomicAdd(double* at, double by) { double was = *at; *at = was + by; return was; }
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long by) { auto was = *at; *at = was + by; return was; }
inline unsigned long long atomicExch(unsigned long long* at, unsigned long long to) { auto was = *at; *at = to; return was; }
// by threads of the host at the same time, as by those of a card
inline unsigned long long atomicMin(unsigned long long* at, unsigned long long to) {
  auto was = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (was > to && !__atomic_compare_exchange_n(at, &was, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return was;
}
inline unsigned long long atomicCAS(unsigned long long* at, unsigned long long from, unsigned long long to) {
  auto was = *at; if (was == from) *at = to; return was;
}

// --- launches ---
template <class... A, size_t... I> void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*reinterpret_cast<std::remove_cv_t<std::remove_reference_t<A>>*>(arguments[I])...);
}
template <class... A> void call(void (*kernel)(A...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>{});
}

#if SYNC
// A fiber runs until it waits for a count to change: the barriers passed by the block, or by its warp.
struct Barrier { unsigned passed = 0, arrived = 0; };
static ucontext_t begun[1024];
static jmp_buf scheduler, paused[1024];
static bool made[1024], ended[1024];
static unsigned *waits_for[1024], last_seen[1024], current, alive, threads;
static Barrier of_block, of_warp[32];
static void (*body)(void*, void**);
static void *body_kernel, **body_arguments;

static void pause() { if (!_setjmp(paused[current])) _longjmp(scheduler, 1); }
static void arrive(Barrier& barrier, unsigned expected) {
  if (++barrier.arrived == expected) { barrier.arrived = 0; barrier.passed++; return; }
  waits_for[current] = &barrier.passed, last_seen[current] = barrier.passed;
  pause();
}
static void __syncthreads() { arrive(of_block, alive); }
static void __syncwarp(unsigned = 0) { arrive(of_warp[current / 32], std::min(32u, threads - current / 32 * 32)); }
template <class T, class From> T exchanged(T value, From from) {
  static T lanes[1024];
  unsigned me = current;
  lanes[me] = value;
  __syncwarp();
  T got = lanes[from(me)];
  __syncwarp();
  return got;
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return exchanged(value, [=](unsigned me) { return me ^ mask; });
}
template <class T> T __shfl_up_sync(unsigned, T value, int by, int = 32) {
  return exchanged(value, [=](unsigned me) { return int(me % 32) >= by ? me - by : me; });
}
static void run_forever() {
  for (;;) {
    body(body_kernel, body_arguments);
    ended[current] = true;
    if (--alive && of_block.arrived == alive) { of_block.arrived = 0; of_block.passed++; }
    pause();
  }
}
static void resume(unsigned thread) {
  constexpr size_t stack = 20672;  // no power of two: their ends would share lines of the cache
  static char* stacks = (char*)std::malloc(1024 * stack);
  current = threadIdx.x = thread;
  if (_setjmp(scheduler)) return;
  if (made[thread]) _longjmp(paused[thread], 1);
  made[thread] = true;
  getcontext(&begun[thread]);
  begun[thread].uc_stack.ss_sp = stacks + thread * stack;
  begun[thread].uc_stack.ss_size = stack;
  makecontext(&begun[thread], run_forever, 0);
  setcontext(&begun[thread]);
}
template <class F> void body_of(void* kernel, void** arguments) { call((F)kernel, arguments); }
template <class F> void run_block(F kernel, void** arguments) {
  body = body_of<F>, body_kernel = (void*)kernel, body_arguments = arguments;
  alive = threads = blockDim.x, of_block.arrived = 0;
  std::fill(ended, ended + threads, false);
  while (alive)
    for (unsigned thread = 0; thread < threads; thread++) {
      if (ended[thread] || (waits_for[thread] && *waits_for[thread] == last_seen[thread])) continue;
      waits_for[thread] = nullptr;
      resume(thread);
    }
}
#else
template <class F> void run_block(F kernel, void** arguments) {
  for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) call(kernel, arguments);
}
#endif

#ifdef HOST_THREADS
// Each of the host's threads has every so many of CUDA's, as neighbours run beside each other there.
#include <thread>
template <class F> void launch(F kernel, void** arguments, unsigned grid, unsigned block) {
  static_assert(!SYNC, "these do not wait for each other");
  std::thread threads[HOST_THREADS];
  for (size_t own = 0; own < HOST_THREADS; own++)
    threads[own] = std::thread([=] {
      gridDim.x = grid, blockDim.x = block;
      for (size_t at = own; at < size_t(grid) * block; at += HOST_THREADS) {
        blockIdx.x = at / block, threadIdx.x = at % block;
        call(kernel, arguments);
      }
    });
  for (auto& thread : threads) thread.join();
}
#else
template <class F> void launch(F kernel, void** arguments, unsigned grid, unsigned block) {
  gridDim.x = grid, blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) run_block(kernel, arguments);
}
#endif
