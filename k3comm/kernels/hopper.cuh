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

DEVICE void barrier_init(u32 bar) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory"); }
// After the last `barrier_init`, before anything uses one: for the block's threads and for the TMA.
DEVICE void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
// Whether the first phase is over. Nothing but the TMA of this very block can be late, so nobody counts the looks.
DEVICE bool barrier_passed(u32 bar) {
  u32 yes;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
               : "=r"(yes) : "r"(bar) : "memory");
  return yes;
}
DEVICE void barrier_wait(u32 bar) {
  u32 yes;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(yes) : "r"(bar) : "memory");
  } while (!yes);
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
DEVICE void product_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

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
