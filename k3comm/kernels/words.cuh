// Words and fragments: loads and stores with the scope that a protocol needs, and BF16 as the bits that it is.
//
// Everything that another CTA or another GPU writes or reads goes through these functions and nowhere else: relaxed at
// system scope between ranks, relaxed or acquire/release at GPU scope between the CTAs of one rank. A fragment is 16
// bytes, four words, eight BF16 elements. Plain PTX, no header: cuda_bf16.h alone would double the compilation time.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// ---- between ranks -------------------------------------------------------------------------------------------------

DEVICE uint4 load_sys(const char* p, uint4) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE uint2 load_sys(const char* p, uint2) {
  uint2 v;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE void store_sys(char* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void store_sys(char* p, uint2 v) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(v.x), "r"(v.y) : "memory");
}
#if K3_MULTICAST
// One store that reaches every rank. `p` is a multicast address; anything but multimem on it is undefined.
DEVICE void store_all(char* p, uint4 v) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),
                  "f"(__uint_as_float(v.w)) : "memory");
}
DEVICE void store_all(char* p, uint2 v) {
  asm volatile("multimem.st.relaxed.sys.global.v2.f32 [%0], {%1, %2};"
               :: "l"(p), "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)) : "memory");
}
#endif
// Empties a word that a peer writes next: a credit must cover it by then (mailbox.cuh).
template <typename T> DEVICE void store_own(char* p, T v) { store_sys(p, v); }
DEVICE void release_sys(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
DEVICE u64 acquire_sys(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// ---- between the CTAs of a rank ------------------------------------------------------------------------------------

DEVICE u64 acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 load_gpu(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE uint4 load_gpu(const u32* p, uint4) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE void store_gpu(u32* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void store_gpu(u32* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEVICE u64 load_gpu(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release(u64* p, u64 v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
DEVICE void add_release(u64* p, u64 v) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
// Counts from 0 to `around` - 1, and again.
DEVICE u32 step_around(u32* p, u32 around) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(around - 1) : "memory");
  return before;
}
DEVICE u64 step(u64* p) {
  u64 before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(p) : "memory");
  return before;
}

// ---- what earlier kernels wrote, past the L1 cache -----------------------------------------------------------------

DEVICE uint4 load_l2(const void* p, uint4) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE uint2 load_l2(const void* p, uint2) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE u32 load_l2(const void* p, u32) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 load_l2_u16(const void* p) {
  u32 v;
  asm volatile("{.reg .u16 h; ld.global.cg.u16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Weights: read-only while the kernel runs, each once, so they are kept out of L1.
DEVICE uint4 load_weight(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }

// ---- BF16 ----------------------------------------------------------------------------------------------------------

// The two elements of a word, the lower one first.
DEVICE float low_half(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high_half(u32 w) { return __uint_as_float(w & 0xFFFF0000u); }
// One rounding each, to nearest even; a NaN becomes 0x7FFF.
DEVICE u32 pack(float low, float high) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}
DEVICE void unpack(float (&x)[8], uint4 v) {
  x[0] = low_half(v.x); x[1] = high_half(v.x); x[2] = low_half(v.y); x[3] = high_half(v.y);
  x[4] = low_half(v.z); x[5] = high_half(v.z); x[6] = low_half(v.w); x[7] = high_half(v.w);
}
DEVICE void unpack(float (&x)[4], uint2 v) {
  x[0] = low_half(v.x); x[1] = high_half(v.x); x[2] = low_half(v.y); x[3] = high_half(v.y);
}
DEVICE uint4 pack(const float (&x)[8]) {
  return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// d += a b, 16 x 16 by 16 x 8, as a warp holds them (PTX ISA, "Matrix Fragments for mma.m16n8k16").
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- launches ------------------------------------------------------------------------------------------------------

// Programmatic dependent launch; both do nothing in a launch without that attribute.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE void pause_cycles(int cycles) {
  const i64 start = clock64();
  while (clock64() - start < cycles) {}
}
DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
