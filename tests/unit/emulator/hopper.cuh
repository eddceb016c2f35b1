// Stands in for k3comm/kernels/hopper.cuh on a CPU: named barriers, boxes of a matrix, products of a warpgroup.
//
// An address of shared memory is an offset into the block's. Boxes are there some time after they are asked for; what
// is read before is NaN. A product is made at once, from what lies there then.
#pragma once
#include "words.cuh"

struct TensorMap { u64 words[16]; };  // address, rows, columns, bytes from row to row, rows and columns of a box

inline char* block_memory() { return current->block->memory.data(); }
inline u32 shared_address(const void* p) { return (u32)((const char*)p - block_memory()); }

// ---- barriers ------------------------------------------------------------------------------------------------------

template <int ID> bool come(int threads) {
  auto& named = current->block->named[ID];
  current->seen = named.generation;
  if (++named.arrived < threads) return false;
  named.arrived = 0;
  named.generation++;
  return true;
}
template <int ID> void sync_at(int threads) {
  if (come<ID>(threads)) return;
  current->blocked = [](Fiber* f) { return f->block->named[ID].generation == f->seen; };
  give_way();
}

inline Barrier& barrier_at(u32 bar) {
  aligned((void*)(uintptr_t)bar, 8);
  if (bar + 8 > current->block->memory.size()) abort();
  return current->block->barriers[bar];
}
inline void barrier_step(Barrier& b) {
  if (b.arrived < b.arrivals || b.bytes) return;
  b.arrived = 0;
  b.round++;
}
inline void barrier_init(u32 bar, u32 arrivals) { barrier_at(bar) = {arrivals}; }
inline void barrier_init_done() {}
inline void barrier_arrive(u32 bar) {
  barrier_at(bar).arrived++;
  barrier_step(barrier_at(bar));
}
inline void barrier_expect(u32 bar, u32 bytes) {
  barrier_at(bar).bytes += bytes;
  barrier_arrive(bar);
}
inline bool barrier_passed(u32 bar, u32 parity) { give_way(); return (barrier_at(bar).round & 1) != parity; }
inline void barrier_wait(u32 bar, u32 parity) { while (!barrier_passed(bar, parity)) {} }
template <int COUNT> void barriers_wait(u32 bar, u32 parity) {
  for (int i = 0; i < COUNT; i++) barrier_wait(bar + 8 * i, parity);
}
inline void set_shared(u32* p, u32 v) { *p = v; }
inline u32 look_shared(const u32* p) { give_way(); return *p; }

// ---- loads ---------------------------------------------------------------------------------------------------------

inline u64 evict_first() { return 0; }
inline void fence_loads() {}
inline void load_bytes(u32 to, const void* from, u32 bytes, u32 bar) {
  if (to % 16 || (uintptr_t)from % 16 || bytes % 16) abort();
  static int loads;
  memset(block_memory() + to, 0xFF, bytes);  // NaN
  for (int i = loads++ % 3 ? 5 : 100; i; i--) give_way();
  memcpy(block_memory() + to, from, bytes);
  barrier_at(bar).bytes -= bytes;
  barrier_step(barrier_at(bar));
}
inline void load_box(u32 to, const TensorMap* map, int column, int row, u32 bar, u64) {
  const u64* m = map->words;
  if (to % 1024 || m[5] != 64) abort();
  static int boxes;
  for (int i = boxes++ % 7 ? 5 : 100; i; i--) give_way();
  for (u64 r = 0; r < m[4]; r++)
    for (u64 c = 0; c < 8; c++) {
      const bool inside = row + r < m[1] && column + 8 * c < m[2];
      const u32 at = to + 128 * r + 16 * c;
      char* place = block_memory() + (at ^ (at >> 7 & 7) << 4);
      if (inside) memcpy(place, (const char*)m[0] + (row + r) * m[3] + 2 * (column + 8 * c), 16);
      else memset(place, 0, 16);
    }
  barrier_at(bar).bytes -= 128 * m[4];
  barrier_step(barrier_at(bar));
}

// ---- products ------------------------------------------------------------------------------------------------------

inline int swizzled(int row, int chunk) { return (row & 7) * 128 + ((chunk ^ (row & 7)) << 4); }
inline void fence_operands() {}
inline u64 operand(u32 address) {
  if (address % 1024) abort();  // an atom would begin elsewhere
  return (u64)(address >> 4) | 64ull << 32;
}
inline void product_begin() {}
inline void product_commit() { current->products.emplace_back(); }
// Element k of a row of an operand: from the format of a matrix descriptor, not from how the kernel stores it.
inline float element(u64 matrix, int row, int k) {
  const u32 place = ((u32)matrix & 0x3FFF) * 16 + row / 8 * ((u32)(matrix >> 32 & 0x3FFF) * 16) + row % 8 * 128 + 2 * k;
  return __uint_as_float((u32)at<uint16_t>(block_memory() + (place ^ (place >> 7 & 7) << 4)) << 16);
}
template <int N> void make_product(float (&d)[N], u64 a, u64 b) {
  const int lane = current->thread.x % 32, warp = current->thread.x / 32 % 4;
  for (int i = 0; i < warp; i++) give_way();  // so that warps drift apart
  for (int n = 0; n < N / 4; n++)
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++) {
        float& sum = d[4 * n + 2 * i + j];
        for (int k = 0; k < 16; k++)
          sum += element(a, 16 * warp + lane / 4 + 8 * i, k) * element(b, 8 * n + lane % 4 * 2 + j, k);
      }
}

// The last group is open. Half of the warps make their products at once, half as late as they may: of what the operands
// hold by then.
template <int N> void product(float (&d)[N], u64 a, u64 b) {
  if (current->products.empty()) current->products.emplace_back();
  if (current->thread.x / 32 % 2) current->products.back().push_back({a, b});
  else make_product(d, a, b);
}
template <int PENDING, int N> void product_wait(float (&d)[N]) {
  auto& groups = current->products;
  while (groups.size() > PENDING + 1) {
    for (auto [a, b] : groups.front()) make_product(d, a, b);
    groups.erase(groups.begin());
  }
  meet();  // for a whole warp
}
