// Stands in for k3comm/kernels/words.cuh on a CPU: the kernels' own source, compiled by g++, with a fiber a CUDA thread.
//
// Every CTA of a grid is there at once; all ranks run at once, each one kernel after another or, overlapping, the next
// one from when all CTAs of the one before have let it. The scheduler goes through the fibers in an order that changes
// with the seed. A barrier, a warp-wide operation, and every look at a mailbox or a counter gives way to the others, so
// a wait waits and a missing barrier shows. Memory is sequentially consistent here.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE inline
#define __device__
#define __global__
#define __noinline__
#define __grid_constant__
#define __align__(n)
#define __launch_bounds__(...)

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct dim { unsigned x; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::min;

// ---- fibers --------------------------------------------------------------------------------------------------------

struct Barrier { u32 arrivals = 0, arrived = 0, bytes = 0, round = 0; };
struct Warp {
  int arrived = 0;
  int still = 0;  // as a block's
  u64 generation = 0;
  u32 words[32][6] = {};
};
struct Block {
  int threads, arrived = 0, live;
  int still = 0;                  // sweeps that it is not run for
  int call = 0;                   // of its rank
  bool released = false;          // the next kernel may start for all that this CTA does
  const char* awaited = nullptr;  // whether the kernel before has ended, where that is waited for
  u64 generation = 0;
  std::vector<char> memory;       // dynamic shared memory
  alignas(16) char fixed[1024];   // static shared memory
  std::vector<Warp> warps;
  std::map<u32, Barrier> barriers;  // in its shared memory, by address
  struct { int arrived = 0; u64 generation = 0; } named[4];  // barriers of some of its warps
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block;
  int rank;
  std::vector<std::vector<std::pair<u64, u64>>> products;  // groups, asked of the tensor cores and not waited for
  dim thread, cta, grid;
  bool done = false;
  bool (*blocked)(Fiber*) = nullptr;  // what it waits for: not run before that is over
  u64 seen = 0;
  int barrier = 0;
};

extern Fiber* current;
extern ucontext_t scheduler;
extern bool trapped;
struct Late { u32* to; u32 word; int call; };
extern std::vector<Late> late[16];  // by rank

#define threadIdx (current->thread)
#define blockIdx (current->cta)
#define gridDim (current->grid)

inline void give_way() { swapcontext(&current->context, &scheduler); }
inline void __trap() {
  trapped = true;
  for (;;) give_way();
}
inline void __syncthreads() {
  Block* b = current->block;
  current->seen = b->generation;
  if (++b->arrived == b->live) {
    b->arrived = 0;
    b->generation++;
    return;
  }
  current->blocked = [](Fiber* f) { return f->block->generation == f->seen; };
  give_way();
}
inline Warp& warp() { return current->block->warps[current->thread.x / 32]; }
inline void meet() {  // all 32 lanes
  Warp& w = warp();
  current->seen = w.generation;
  if (++w.arrived == 32) {
    w.arrived = 0;
    w.generation++;
    return;
  }
  current->blocked = [](Fiber* f) { return f->block->warps[f->thread.x / 32].generation == f->seen; };
  give_way();
}
inline void __syncwarp() { meet(); }
template <typename T> T exchange_lanes(T v, int from) {
  static_assert(sizeof(T) <= 8);
  memcpy(warp().words[current->thread.x % 32], &v, sizeof(T));
  meet();
  T got;
  memcpy(&got, warp().words[from & 31], sizeof(T));
  meet();
  return got;
}
template <typename T> T __shfl_sync(u32, T v, int lane) { return exchange_lanes(v, lane); }
template <typename T> T __shfl_xor_sync(u32, T v, int mask) { return exchange_lanes(v, (int)(current->thread.x % 32) ^ mask); }

// ---- numbers -------------------------------------------------------------------------------------------------------

inline float __uint_as_float(u32 w) { float f; memcpy(&f, &w, 4); return f; }
inline u32 __float_as_uint(float x) { u32 w; memcpy(&w, &x, 4); return w; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __frsqrt_rn(float x) { return (float)(1.0 / std::sqrt((double)x)); }

DEVICE float low_half(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high_half(u32 w) { return __uint_as_float(w & 0xFFFF0000u); }
inline u32 bf16(float f) {
  u32 w = __float_as_uint(f);
  if (f != f) return 0x7FFF;
  return (w + 0x7FFF + (w >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float low, float high) { return bf16(low) | bf16(high) << 16; }
DEVICE void unpack(float (&x)[8], uint4 v) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; i++) x[2 * i] = low_half(w[i]), x[2 * i + 1] = high_half(w[i]);
}
DEVICE void unpack(float (&x)[4], uint2 v) {
  x[0] = low_half(v.x), x[1] = high_half(v.x), x[2] = low_half(v.y), x[3] = high_half(v.y);
}
DEVICE uint4 pack(const float (&x)[8]) {
  return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
// From the fragment layouts of the PTX ISA, not from how the kernel uses them.
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int lane = current->thread.x % 32, g = lane / 4, t = lane % 4;
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp().words[lane], mine, sizeof(mine));
  meet();
  const auto& words = warp().words;
  auto half = [](u32 w, int odd) { return odd ? high_half(w) : low_half(w); };
  for (int i = 0; i < 4; i++) {
    const int row = g + (i >= 2 ? 8 : 0), column = 2 * t + i % 2;
    float sum = d[i];
    for (int k = 0; k < 16; k++) {
      const u32 a = words[row % 8 * 4 + k % 8 / 2][(row >= 8) + 2 * (k >= 8)];
      const u32 b = words[column * 4 + k % 8 / 2][4 + (k >= 8)];
      sum += half(a, k % 2) * half(b, k % 2);
    }
    d[i] = sum;
  }
  meet();
}

// ---- memory --------------------------------------------------------------------------------------------------------

template <typename T> T at(const void* p) { T v; memcpy(&v, p, sizeof(T)); return v; }
inline void aligned(const void* p, size_t n) { if ((uintptr_t)p % n) abort(); }

template <typename T> T load_sys(const char* p, T) { aligned(p, sizeof(T)); give_way(); return at<T>(p); }
template <typename T> void store_sys(char* p, T v) {
  aligned(p, sizeof(T));
  // Word by word, with others in between: a fragment may arrive torn.
  const u32* words = (const u32*)&v;
  for (size_t i = 0; i < sizeof(T) / 4; i++) {
    memcpy(p + 4 * i, words + i, 4);
    if (i == 1) give_way();
  }
}
template <typename T> T load_l2(const void* p, T) { aligned(p, sizeof(T)); return at<T>(p); }
inline u32 load_l2_u16(const void* p) { return at<uint16_t>(p); }
inline uint4 load_weight(const void* p) { aligned(p, 16); return at<uint4>(p); }
inline void prefetch_l2(const void*) {}
inline void fence_alias() {}
// What a rank empties is seen by its peers late: as late as the next call's credit, and over whatever came there by
// then. What counts for this rank itself, that the word is empty before it looks again, holds: a call lies between.
template <typename T> void store_own(char* p, T v) {
  aligned(p, sizeof(T));
  for (size_t i = 0; i < sizeof(T) / 4; i++)
    late[current->rank].push_back({(u32*)p + i, ((u32*)&v)[i], current->block->call});
}
inline void release_sys(u64* p, u64 v) {
  std::vector<Late> own;  // this call's
  for (const Late& one : late[current->rank]) {
    if (one.call < current->block->call) *one.to = one.word;
    else own.push_back(one);
  }
  late[current->rank] = own;
  give_way();
  *p = v;
}
inline u64 acquire_sys(const u64* p) { give_way(); return *p; }
inline u64 acquire(const u64* p) { give_way(); return *p; }
inline u32 acquire(const u32* p) { give_way(); return *p; }
inline u32 load_gpu(const u32* p) { return *p; }
inline void store_gpu(u32* p, u32 v) { *p = v; }
inline u64 load_gpu(const u64* p) { give_way(); return *p; }
inline uint4 load_gpu(const u32* p, uint4) { aligned(p, 16); give_way(); return at<uint4>(p); }
inline void store_gpu(u32* p, uint4 v) { store_sys((char*)p, v); }
inline void pause_cycles(int) { give_way(); }
inline void store_release(u64* p, u64 v) { *p = v; }
inline void add_release(u64* p, u64 v) { *p += v; }
inline u32 step_around(u32* p, u32 around) { const u32 before = *p; *p = (before + 1) % around; return before; }
inline u64 step(u64* p) { return (*p)++; }
inline u32 atomicCAS(u32* p, u32 expected, u32 v) { const u32 before = *p; if (before == expected) *p = v; return before; }
inline void __threadfence_system() {}
inline void __nanosleep(int) { give_way(); }
inline i64 clock64() { return 0; }
inline void launch_dependents() {  // one thread of a CTA is enough
  current->block->released = true;
  give_way();
}
inline void wait_for_predecessor() {
  const char* awaited = current->block->awaited;
  if (!awaited || *awaited) return;
  current->blocked = [](Fiber* f) { return !*f->block->awaited; };
  give_way();
}
extern u64 ticks;
inline u64 nanoseconds() { return ticks += 1000; }
