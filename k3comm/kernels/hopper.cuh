// What only sm_90a has: bulk loads of boxes by the TMA, barriers in shared memory that count their bytes, and wgmma.
//
// Addresses of shared memory are 32-bit. Both operands of a product lie there as rows of 128 bytes (64 BF16 of k),
// eight rows after one another an atom of 1024 bytes at a multiple of that, with the 128-byte swizzle: the 16-byte
// chunk c of row r is at place c ^ (r % 8). The TMA writes weights like that; `swizzled` is the same for what threads write.
#pragma once
#include "words.cuh"

struct __align__(64) TensorMap { u64 words[16]; };

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- barriers ------------------------------------------------------------------------------------------------------

// Between some warps of a block, where others have gone their own way: all of `threads` have to come.
template <int ID> DEVICE void sync_at(int threads) {
  asm volatile("bar.sync %0, %1;" :: "n"(ID), "r"(threads) : "memory");
}

// Over when so many arrivals and all bytes that they expect have come; then it starts anew. Whoever waits names the
// parity of the round: 0 for the first one.
DEVICE void barrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(arrivals) : "memory");
}
// After the last `barrier_init`, before anything uses one: for the block's threads and for the TMA.
DEVICE void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
// Nothing but this very block and its TMA can be late, or what a warp of it waits for with a deadline of its own, so nobody
// counts the looks.
DEVICE bool barrier_passed(u32 bar, u32 parity) {
  u32 yes;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(yes) : "r"(bar), "r"(parity) : "memory");
  return yes;
}
// Gives up after a time that the hardware sets.
DEVICE bool barrier_try(u32 bar, u32 parity) {
  u32 yes;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(yes) : "r"(bar), "r"(parity) : "memory");
  return yes;
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  while (!barrier_try(bar, parity)) {}
}
// A warp waits for COUNT barriers that lie after one another, a lane for each: one after another they cost 30 ns each.
template <int COUNT> DEVICE void barriers_wait(u32 bar, u32 parity) {
  const u32 mine = bar + 8 * min(threadIdx.x & 31, COUNT - 1);
  while (!__all_sync(~0u, barrier_try(mine, parity))) {}
  __syncwarp();
}

// A word that one thread of the block sets and another one looks at.
DEVICE void set_shared(u32* p, u32 v) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" :: "r"(shared_address(p)), "r"(v) : "memory");
}
DEVICE u32 look_shared(const u32* p) {
  u32 v;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}

// ---- loads ---------------------------------------------------------------------------------------------------------

// Read once a call, and more than the L2 cache holds: the first to go.
DEVICE u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Bytes as they lie there, a multiple of 16.
DEVICE void load_bytes(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
// Between what threads have stored to global memory and what is loaded like that: by whoever stored it, before it says so,
// and by whoever loads it, once it knows.
DEVICE void fence_loads() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// The box whose corner is at (column, row) of the matrix; `bar` counts its bytes.
DEVICE void load_box(u32 to, const TensorMap* map, int column, int row, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(bar), "l"(policy) : "memory");
}

// ---- products ------------------------------------------------------------------------------------------------------

DEVICE int swizzled(int row, int chunk) { return (row & 7) * 128 + ((chunk ^ (row & 7)) << 4); }
// This thread's stores to shared memory before what the tensor cores read there, once a barrier of the threads is past.
DEVICE void fence_operands() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A matrix descriptor: 128-byte swizzle, atoms 1024 bytes apart (PTX ISA, "Matrix descriptor format"). A k16 step is 32
// bytes further, whatever the swizzle: it works on address bits.
DEVICE u64 operand(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

DEVICE void product_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All products are made but those of the last PENDING groups. With 0 `d` is there, and nothing may read it earlier.
template <int PENDING, int COUNT> DEVICE void product_wait(float (&d)[COUNT]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
  if constexpr (PENDING == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i]) :: "memory");
  }
}

// d += a b, 64 x 16 by 16 x N for the four warps of a warpgroup; N is 2 times the number of d's elements. In lane
// (g, t) of warp w, d[4 n + 2 i + j] is at row 16 w + g + 8 i, column 8 n + 2 t + j (PTX ISA, "wgmma.mma_async").
DEVICE void product(float (&d)[4], u64 a, u64 b) {
  asm volatile("{.reg .pred more; setp.eq.u32 more, 0, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3}, %4, %5, more, 1, 1, 0, 0;}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}
DEVICE void product(float (&d)[8], u64 a, u64 b) {
  asm volatile("{.reg .pred more; setp.eq.u32 more, 0, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, more, 1, 1, 0, 0;}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "l"(a), "l"(b));
}
DEVICE void product(float (&d)[16], u64 a, u64 b) {
  asm volatile("{.reg .pred more; setp.eq.u32 more, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, more, 1, 1, 0, 0;}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "l"(a), "l"(b));
}
DEVICE void product(float (&d)[32], u64 a, u64 b) {
  asm volatile("{.reg .pred more; setp.eq.u32 more, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, more, 1, 1, 0, 0;}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(a), "l"(b));
}
DEVICE void product(float (&d)[64], u64 a, u64 b) {
  asm volatile("{.reg .pred more; setp.eq.u32 more, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, more, 1, 1, 0, 0;}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "l"(a), "l"(b));
}
