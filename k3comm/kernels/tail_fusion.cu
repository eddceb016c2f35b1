// The fused decode tail:
//   out = residual + scale * (W_up @ rmsnorm(sum_r routed_r; g, eps)) + b + sum_r shared_r               [m, H], K0
//
// The grid of `exchange` is GROUPS x SLICES CTAs, the same for every m. A CTA owns one slice of the latent columns and
// one group of this rank's output columns (rows of W_up). It
//   1 publishes its share of the latent and of the shared partial sums, of many rows the latter beside stage 4,
//   2 clears its share of what the call before used,
//   3 sums, over the ranks in rank order, its own slice of the latent mailbox: nobody hands it anything (but
//     for many rows: in two shots, tail_two_shot.cuh, the groups of a slice hand each other their share of the sums),
//   4 multiplies s * g, as two BF16 terms, with its block of W_up. The norm's factor r is a number a row and comes later.
// The slices' products and squares meet in `finish` (tail_finish.cuh), behind the end of a kernel or, in one kernel, behind
// a count; for benchmarks also as words that are their own flags (cells). It
//   5 sums them over slices in order, then r, scale, bias, shared, residual; one rounding,
//   6 publishes the finished columns,
//   7 copies out what all ranks have published, and empties it.
// On the device clears come behind or beside the sums. tail_exchange + tail_finish are two kernels; tail_whole is both in
// one, groups waiting for their own slices only. One CTA more, of tail_finish or of tail_whole, exchanges credits
// (mailbox.cuh).
//
// Stage 4 has two paths; the geometry says which. The general one (tail_general.cuh) runs everywhere: weights into
// registers, mma.sync. K3_BOX_ROWS > 0 is the one for sm_90a (tail_hopper.cuh): one more warp streams the CTA's block of
// W_up into shared memory from the kernel's start on, at first a few boxes at a time (a burst of the whole shard fills the
// memory system's queues and every small access waits behind it: 3 us), all of it once this CTA has its first rows, or in
// two shots all groups' sums; wgmma multiplies from there.
//
// A row's bits depend on nothing but the row and the geometry: no order of additions knows m.
// A CTA waits for credits of the call before, and then publishes its latent before it waits for anything of this call, and
// its shared rows before it waits for anything but latent, or for CTAs of its own rank that wait for nothing but latent; the
// whole grid is resident; so no rank waits in a ring.
#include "mailbox.cuh"
#if K3_BOX_ROWS
#include "hopper.cuh"
#endif

constexpr int H = K3_HIDDEN, L = K3_LATENT, W = K3_WORLD, C = H / W;
constexpr int THREADS = K3_THREADS, WARPS = THREADS / 32;
constexpr int SLICE = K3_SLICE, SLICES = K3_SLICES;                 // columns of a slice, a multiple of 32
constexpr int GROUPS = K3_GROUPS, GROUP_TILES = K3_GROUP_TILES;     // tiles of 16 output columns in a group
constexpr int CELLS = GROUPS * SLICES;                              // CTAs that share the work
constexpr int TILES = (C + 15) / 16;
constexpr int TOKENS = K3_TOKENS;                                   // rows that this variant holds at once
constexpr int MAX_ROWS = K3_MAX_ROWS;
constexpr int FRAGMENTS = SLICE / 8;                                // of a row in a slice
constexpr bool FLAGGED = K3_WHOLE && TOKENS <= K3_CELL_ROWS;        // products and squares are their own flags
constexpr int AT_ONCE = 8;                                          // ranks whose fragments are in flight at once

static_assert(H % (8 * W) == 0 && L % 8 == 0 && W >= 2 && W <= 16);
static_assert(SLICE % 32 == 0 && SLICES * SLICE >= L && (SLICES - 1) * SLICE < L);
static_assert(GROUPS * GROUP_TILES >= TILES && (GROUPS - 1) * GROUP_TILES < TILES && CELLS < MAX_CELLS);
static_assert(TOKENS <= MAX_ROWS && MAX_ROWS <= 64 && sizeof(Counters) == K3_COUNTER_BYTES);

// What a rank has itself it does not send to itself, but for what each CTA would have to make anew (the deferred
// finalize) and what a multicast store brings here in any case.
constexpr bool MAIL_OWN_LATENT = K3_DEFERRED || K3_MULTICAST, MAIL_OWN_OUT = K3_MULTICAST;
constexpr int GATHERED = MAIL_OWN_OUT ? W : W - 1;                  // ranks whose columns come through the mailbox

// Where threads meet: in a block with loading warps only the others do, the first THREADS.
#if K3_BOX_ROWS && (K3_ENTRY == 1 || K3_ENTRY == 3)
constexpr int BLOCK = THREADS + (K3_TWO_SHOT ? 64 : 32);
DEVICE void sync_block() { sync_at<1>(THREADS); }
#else
constexpr int BLOCK = THREADS;
DEVICE void sync_block() { __syncthreads(); }
#endif

enum Flag : u32 { NORM_FP32 = 1, BIAS_FP32 = 2, NEXT_NORM_FP32 = 4, FRESH_WEIGHTS = 8 };

// Everything that a launch gets, made by `Arguments` in tail_fusion.py. Strides are elements, addresses are of rank p's
// memory as this rank sees it.
struct Arguments {
#if K3_BOX_ROWS
  TensorMap boxes;    // of this rank's [C, L] of W_up, in boxes of K3_BOX_ROWS x 64
#else
  u64 boxes[16];
#endif
  // This lane's mailboxes. Each address is where this rank's own slot of row 0 in region 0 begins.
  char* latent[16];
  char* shared[16];
  char* gather[16];
  u64* credits[16];   // this rank's word among rank p's credits
  char* latent_all;   // the same on the multicast address
  char* gather_all;
  // This rank's mailboxes, where row 0 of region 0 begins.
  const char* own_latent;
  const char* own_shared;
  char* own_gather;
  Counters* counters;
  Record* record;
  float* partials;    // [GROUPS' columns: MAX_ROWS, SLICES, C]
  float* squares;     // [GROUPS, MAX_ROWS, SLICES]; behind them what two shots need (tail_two_shot.cuh), and the cells
  u64 region_bytes;   // from a region to the next
  u64 gather_bytes;   // from the gather mailbox of even calls to that of odd ones
  u64 deadline_ns;
  // The call.
  const char* routed;          // [m, L], or [R, >= L] deferred
  const int* index;            // [m, K]
  const char* expert_weights;  // [m, K]
  const char* shared_rows;     // [m, H]
  const char* norm;            // [L] or null
  const char* weight;          // this rank's [C, L]
  const char* residual;        // [m, H] or null
  const char* bias;            // this rank's [C] or null
  char* out;                   // [m, H], contiguous
  const char* next_norm;       // [H]
  char* normed;                // [m, H], contiguous
  i64 routed_stride, shared_stride, weight_stride, residual_stride;
  int rank, rows, top_k, layer;
  u32 flags;
  float scale, eps;
  u32 link_cycles;             // benchmarks: by how much a publication is held back, to stand for a link
  u32 window;                  // boxes of weights in flight while the kernel before is not over,
  u32 poll_window;             // and from then on, until the first rows are in, in two shots all sums
};
static_assert(sizeof(Arguments) == K3_ARGUMENT_BYTES && sizeof(Arguments) % 64 == 0);  // a tensor map's alignment

DEVICE Waiting waiting(const Arguments& a, u64 call) {
  return {a.counters, a.record, a.deadline_ns, call, MOE_TAIL, (u32)a.layer, (u32)a.rank};
}

// ---- publication ---------------------------------------------------------------------------------------------------

DEVICE void link(const Arguments& a) {
#if K3_LINK
  pause_cycles(a.link_cycles);
#endif
}

// To rank (rank + i) % W, i = 1 .. W: not all ranks write to the same one at once. Own memory comes last, if at all.
template <bool OWN, typename T>
DEVICE void put_to_all(const Arguments& a, char* const (&to)[16], char* to_all, u64 offset, T v) {
  link(a);
#if K3_MULTICAST
  store_all(to_all + offset, v);
#else
#pragma unroll
  for (int i = 1; i < W + OWN; i++) {
    const int peer = a.rank + i < W ? a.rank + i : a.rank + i - W;
    store_sys(to[peer] + offset, v);
  }
#endif
}

#if K3_DEFERRED
constexpr int SLOTS = K3_BOX_ROWS || K3_WHOLE ? 4 : 8;  // rows in flight a thread

// Eight columns of one row of the deferred finalize, A5: fma over ascending slots, one rounding. A slot of -1 reads
// nothing. All lanes of a warp call this for the same token; `some` says whether this lane has columns.
#if K3_BOX_ROWS || K3_WHOLE
static __device__ __noinline__  // or it spills: a block of 17 or 18 warps has 96 registers a thread, one kernel needs 128
#else
DEVICE
#endif
uint4 finalized(const char* routed, i64 routed_stride, const int* index, const char* expert_weights, int top_k,
                int token, int column, bool some) {
  const int lane = threadIdx.x & 31;
  float sum[8] = {};
  for (int k0 = 0; k0 < top_k; k0 += 32) {
    // One wide load for the warp: lane l has slot k0 + l.
    int mine = -1;
    u32 bits = 0;
    if (k0 + lane < top_k) {
      const i64 slot = (i64)token * top_k + k0 + lane;
      mine = (int)load_l2(index + slot, u32());
#if K3_DEFERRED == 1
      bits = load_l2_u16(expert_weights + 2 * slot) << 16;
#else
      bits = load_l2(expert_weights + 4 * slot, u32());
#endif
    }
#pragma unroll 1
    for (int k1 = 0; k1 < 32 && k0 + k1 < top_k; k1 += SLOTS) {
      uint4 row[SLOTS];
#pragma unroll
      for (int j = 0; j < SLOTS; j++) {
        const int at = __shfl_sync(~0u, mine, k1 + j);
        if (at >= 0 && some) row[j] = load_l2(routed + 2 * ((i64)at * routed_stride + column), uint4());
      }
#pragma unroll
      for (int j = 0; j < SLOTS; j++) {
        const int at = __shfl_sync(~0u, mine, k1 + j);
        const float weight = __uint_as_float(__shfl_sync(~0u, bits, k1 + j));
        if (at >= 0 && some) {
          float x[8];
          unpack(x, row[j]);
#pragma unroll
          for (int i = 0; i < 8; i++) sum[i] = __fmaf_rn(weight, x[i], sum[i]);
        }
      }
    }
  }
  return pack(sum);
}
#endif

// The thread that took the call's number passes it on once the credits of the call before are in.
DEVICE void begin(const Arguments& a, u64* said, u64 call, u64 credited) {
#if K3_CREDITS
  wait_credited(waiting(a, call), credited);
#endif
  *said = call;
}

// One thread, beside what the others publish and poll: waits for the calls before this one, says how many rows this one
// has, and returns what the call before used. Thrice the deadline: beside kernels that are not ours this begins before the
// call before does its last waits, and whoever waits for data says better what is missing. Out of line, or 64 rows spill.
static __device__ __noinline__ u32 turn(const Arguments& a, u64 call) {
  Waiting w = waiting(a, call);
  w.deadline_ns *= 3;
  wait_completed(w);
  if (blockIdx.x == 0) store_gpu(&a.counters->rows[call & 1], (u32)a.rows << 1 | MAIL_OWN_LATENT);
  return load_gpu(&a.counters->rows[(call + 1) & 1]);
}

// What is published goes in chunks of 32 fragments a warp; neighbouring chunks go to different CTAs, and shared ones come
// behind the latent ones, so that few rows use many SMs and warps.
constexpr int LATENT_CHUNKS = (L / 8 + 31) / 32, SHARED_CHUNKS = ((H - C) / 8 + 31) / 32, CHUNK_STRIDE = WARPS * CELLS;

// This lane's fragment of a chunk, if it has one: of a row of the latent, or of the shared columns that others own. Whether
// it is of the latent follows from the chunk, and is given where the compiler can know it beforehand.
struct Piece {
  int token, column;
  bool latent, some;
};
DEVICE Piece piece_of(const Arguments& a, int chunk, bool latent) {
  const int number = latent ? chunk : chunk - a.rows * LATENT_CHUNKS, chunks = latent ? LATENT_CHUNKS : SHARED_CHUNKS;
  Piece p{number / chunks, 8 * (number % chunks * 32 + (int)(threadIdx.x & 31)), latent, false};
  p.some = p.column < (latent ? L : H - C);
  if (!latent && p.column >= a.rank * C) p.column += C;
  return p;
}

// Hints, for a call whose inputs are not in the L2 cache, and which may come before whoever makes them is done: the rows
// that this CTA publishes.
DEVICE void expect_published(const Arguments& a) {
  const int latent_chunks = a.rows * LATENT_CHUNKS;
  for (int chunk = (threadIdx.x >> 5) * CELLS + blockIdx.x; chunk < latent_chunks + a.rows * SHARED_CHUNKS;
       chunk += CHUNK_STRIDE) {
    const Piece p = piece_of(a, chunk, chunk < latent_chunks);
    if (threadIdx.x % 8 || !p.some) continue;  // a thread a line of 128 bytes
    if (!p.latent) prefetch_l2(a.shared_rows + 2 * (p.token * a.shared_stride + p.column));
#if !K3_DEFERRED
    else prefetch_l2(a.routed + 2 * (p.token * a.routed_stride + p.column));
#endif
  }
}

// Latent rows to every rank, shared rows by their columns to the rank that owns them, unless that is this one.
template <bool LATENT, bool SHARED>
DEVICE void publish(const Arguments& a, int region) {
#if K3_MULTICAST
  fence_alias();
#endif
  const int latent_chunks = a.rows * LATENT_CHUNKS;
  const int last = SHARED ? latent_chunks + a.rows * SHARED_CHUNKS : latent_chunks;
  const u64 start = region * a.region_bytes;
  int chunk = (threadIdx.x >> 5) * CELLS + blockIdx.x;
  if (!LATENT)
    while (chunk < latent_chunks) chunk += CHUNK_STRIDE;
  for (; chunk < last; chunk += CHUNK_STRIDE) {
    const Piece p = piece_of(a, chunk, LATENT && (!SHARED || chunk < latent_chunks));
    uint4 v = make_uint4(0, 0, 0, 0);
    if (p.latent) {
#if K3_DEFERRED
      v = finalized(a.routed, a.routed_stride, a.index, a.expert_weights, a.top_k, p.token, p.column, p.some);
#else
      if (p.some) v = load_l2(a.routed + 2 * (p.token * a.routed_stride + p.column), uint4());
#endif
    } else if (p.some) {
      v = load_l2(a.shared_rows + 2 * (p.token * a.shared_stride + p.column), uint4());
    }
    if (!p.some) continue;
    v = publishable(v);
    if (p.latent) {
      put_to_all<MAIL_OWN_LATENT>(a, a.latent, a.latent_all, start + 2 * ((u64)p.token * W * L + p.column), v);
    } else {
      link(a);
      store_sys(a.shared[p.column / C] + start + 2 * ((u64)p.token * W * C + p.column % C), v);
    }
  }
}

// Empties what the call before used, and no more: rows come first in a mailbox, so it is one prefix of each part. `used`
// is that call's word of Counters::rows.
DEVICE void clear(const Arguments& a, u32 used, int region) {
  const u64 start = (region == 0 ? 2 : region - 1) * a.region_bytes;
  const u32 rows = used >> 1, latent = rows * W * (L / 8), all = latent + rows * (H / 8);
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < all; i += CELLS * THREADS) {
    const bool is_latent = i < latent;
    const u32 at = is_latent ? i : i - latent, from = at / (is_latent ? L / 8 : C / 8) % W;
    if (from == a.rank && !(is_latent && used & 1)) continue;
    store_own(const_cast<char*>(is_latent ? a.own_latent : a.own_shared) + start + 16 * (u64)at, empty(uint4()));
  }
}

// ---- the latent sums -----------------------------------------------------------------------------------------------

// Adds what came from ranks FIRST on, in that order. Starts from rank 0's values, not from zero, which would turn -0.0
// into +0.0.
template <int FIRST, typename T, int COUNT, int N>
DEVICE void add(float (&sum)[N], const T (&v)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float x[N];
    unpack(x, v[i]);
#pragma unroll
    for (int k = 0; k < N; k++) sum[k] = FIRST + i == 0 ? x[k] : sum[k] + x[k];
  }
}

// The fragments of ranks FIRST .. W - 1. T: uint4 with the eight columns of the latent sums, uint2 with four others.
template <int FIRST, typename T, int N>
DEVICE void add_ranks(float (&sum)[N], const Slots& from, const Waiting& w, u32 phase, u32 token) {
  if constexpr (FIRST < W) {
    constexpr int COUNT = W - FIRST < AT_ONCE ? W - FIRST : AT_ONCE;
    T v[COUNT];
    ask<FIRST>(v, from);
    receive<FIRST>(v, from, w, phase, token);
    add<FIRST>(sum, v);
    add_ranks<FIRST + COUNT, T>(sum, from, w, phase, token);
  }
}

// Every rank's eight columns of the latent from `column` on.
DEVICE Slots latent_slots(const Arguments& a, int region, int token, int column) {
  return {a.own_latent + region * a.region_bytes + 2 * ((u64)token * W * L + column), 2 * L,
          a.routed + 2 * (token * a.routed_stride + column), MAIL_OWN_LATENT ? W : a.rank};
}

// Eight elements of a vector that is BF16 or fp32.
DEVICE void load_vector(float (&x)[8], const char* p, int column, bool fp32) {
  if (fp32) {
    const uint4 low = load_l2(p + 4 * column, uint4()), high = load_l2(p + 4 * column + 16, uint4());
    x[0] = __uint_as_float(low.x); x[1] = __uint_as_float(low.y);
    x[2] = __uint_as_float(low.z); x[3] = __uint_as_float(low.w);
    x[4] = __uint_as_float(high.x); x[5] = __uint_as_float(high.y);
    x[6] = __uint_as_float(high.z); x[7] = __uint_as_float(high.w);
  } else {
    unpack(x, load_l2(p + 2 * column, uint4()));
  }
}

// x as two BF16 terms. Where the high one is not finite the low one is nothing: inf - inf would make a NaN of it.
DEVICE void split(const float (&x)[8], uint4& high, uint4& low) {
  high = pack(x);
  float rounded[8], rest[8];
  unpack(rounded, high);
#pragma unroll
  for (int k = 0; k < 8; k++) rest[k] = fabsf(rounded[k]) < __uint_as_float(0x7F800000u) ? x[k] - rounded[k] : 0.0f;
  low = pack(rest);
}

// ---- partial products and squares ----------------------------------------------------------------------------------

// In one kernel of few rows they can be data that is its own flag, as in a mailbox: a count of the slices is three round
// trips more. Each word has one reader, who empties it: squares are there once for each unit of four columns. What
// call n empties is written again behind the wait of call n + 1 for all calls before it.
DEVICE u32* product_cells(const Arguments& a, int token, int column) {
  return (u32*)a.partials + K3_CELLS_AT / 4 + ((u64)token * SLICES * C + column);  // slices are C apart
}
DEVICE u32* square_cells(const Arguments& a, int token, int column) {
  return product_cells(a, K3_CELL_ROWS, 0) + ((u64)token * SLICES * C + column) / 4;  // slices are C / 4 apart
}

DEVICE void put_product(const Arguments& a, int slice, int token, int column, float v) {
  if (FLAGGED) store_gpu(product_cells(a, token, slice * C + column), publishable(v));
  else a.partials[((u64)token * SLICES + slice) * C + column] = v;
}

// The sum of a row's squares, by one thread or, where they are flags, by all of a warp.
DEVICE void put_square(const Arguments& a, int group, int slice, int token, float v) {
  constexpr int WIDE = GROUP_TILES * 16;
  if (FLAGGED) {
    u32* to = square_cells(a, token, group * WIDE) + slice * (C / 4);
    for (int i = threadIdx.x & 31; i < min(WIDE, C - group * WIDE) / 4; i += 32) store_gpu(to + i, publishable(v));
  } else {
    a.squares[(group * MAX_ROWS + token) * SLICES + slice] = v;
  }
}

// Stages 3 and 4, and `exchange`, which is stages 1 to 4.
#if K3_BOX_ROWS
#include "tail_hopper.cuh"
#else
#include "tail_general.cuh"
#endif

#include "tail_finish.cuh"

// ---- the end of a call ----------------------------------------------------------------------------------------------

// Says that the call is done whole: after all clears and re-arms of all CTAs, with release. Every CTA of the last kernel
// adds its share; where there are two the first has ended by then.
DEVICE void complete(const Arguments& a) {
  sync_block();
  if (threadIdx.x == 0) add_release(&a.counters->completed, blockIdx.x ? 1 : COMPLETIONS - (gridDim.x - 1));
}

// What one CTA does beside the others, waiting for none, in its first warp. It has a cell of its own.
DEVICE void exchange_credits_of_call(const Arguments& a) {
  if (threadIdx.x >= 32) return;
  u64 call = 0;
  if (threadIdx.x == 0) call = step(&a.counters->cells[CELLS]);
  call = __shfl_sync(~0u, call, 0);
  launch_dependents();
#if K3_CREDITS
  exchange_credits<W>(waiting(a, call), a.credits);
#else
  wait_for_predecessor();  // or its share of the completion word would stand for one of the call before
#endif
}

// ---- entries -------------------------------------------------------------------------------------------------------

#if K3_BOX_ROWS
constexpr bool TWICE = THREADS <= 256 && W <= 8 && 2 * (K3_SHARED_BYTES + 1024) <= 228 << 10;
constexpr int AN_SM = TWICE ? 2 : 1;  // blocks: what the registers have to suffice for
#else
constexpr int AN_SM = 1;
#endif

#if K3_ENTRY == 1
extern "C" __global__ void __launch_bounds__(BLOCK, AN_SM) tail_exchange(const __grid_constant__ Arguments a) {
#if K3_BOX_ROWS
  if (threadIdx.x >= THREADS) return load(a);
#endif
  exchange(a);
}
#elif K3_ENTRY == 2
constexpr int FINISH_THREADS = K3_FINISH_THREADS;

// Runs right behind tail_exchange; the last CTA, which waits for no kernel, beside it. The number is in the cells: the CTAs
// of tail_exchange stepped theirs before they let this kernel start, and the next call's can't step them before all CTAs
// here have let it.
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) tail_finish(const __grid_constant__ Arguments a) {
  __shared__ u64 number;
  const int last = gridDim.x - 1;
  if (blockIdx.x == last) {
    exchange_credits_of_call(a);
    return complete(a);
  }
  if (threadIdx.x == 0) number = load_gpu(&a.counters->cells[blockIdx.x % CELLS]) - 1;
  __syncthreads();
  const u64 call = number;
  launch_dependents();
  const Units units{(int)(blockIdx.x * FINISH_THREADS + threadIdx.x), last * FINISH_THREADS, a.rows * (C / 4), C / 4, 0};
  expect_finished(a, units);
  wait_for_predecessor();
  finish(a, call, units);
  complete(a);
}
#elif K3_ENTRY == 3
// A group's columns, by the CTAs of all its slices; `per_row` and `first` count units of four columns.
DEVICE Units units_of_group(const Arguments& a) {
  const int group = blockIdx.x / SLICES, slice = blockIdx.x % SLICES;
  const int per_row = min(GROUP_TILES * 16, C - group * GROUP_TILES * 16) / 4;
  return {(int)(slice * THREADS + threadIdx.x), SLICES * THREADS, a.rows * per_row, per_row, group * GROUP_TILES * 4};
}

extern "C" __global__ void __launch_bounds__(BLOCK, AN_SM) tail_whole(const __grid_constant__ Arguments a) {
#if K3_BOX_ROWS
  if (threadIdx.x >= THREADS) {
    if (blockIdx.x < CELLS) load(a);
    return;
  }
#endif
  if (blockIdx.x == CELLS) {
    exchange_credits_of_call(a);
    return complete(a);
  }
  expect_finished(a, units_of_group(a));
  const u64 call = exchange(a);
  if (!FLAGGED) {
    sync_block();
    if (threadIdx.x == 0) {
      // Two rounds on and on, so that nobody has to reset it: it can't be more than one round further.
      u32* arrived = &a.counters->arrived[blockIdx.x / SLICES];
      const u32 before = step_around(arrived, 2 * SLICES), round = before / SLICES;
      Waiting w = waiting(a, call);
      w.deadline_ns *= 2;  // the CTAs that it waits for wait for data, with one
      Patience patience;
      if (before % SLICES != SLICES - 1)
        while (acquire(arrived) / SLICES == round) patience.lose(w, PHASE_PARTIALS, 0, w.rank);
    }
    sync_block();
  }
  finish(a, call, units_of_group(a));
  complete(a);
}
#elif K3_ENTRY == 4
// The next layer's RMSNorm of the finished rows, a CTA a row: nothing is communicated.
extern "C" __global__ void __launch_bounds__(THREADS) tail_next_norm(const __grid_constant__ Arguments a) {
  __shared__ float sums[WARPS];
  launch_dependents();
  wait_for_predecessor();
  const u64 start = 2 * (u64)blockIdx.x * H;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < H / 8; i += THREADS) {
    float x[8];
    unpack(x, load_l2(a.out + start + 16 * i, uint4()));
#pragma unroll
    for (int k = 0; k < 8; k++) sum = __fmaf_rn(x[k], x[k], sum);
  }
#pragma unroll
  for (int k = 16; k; k >>= 1) sum += __shfl_xor_sync(~0u, sum, k);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = sums[0];
#pragma unroll
  for (int i = 1; i < WARPS; i++) sum += sums[i];
  const float r = __frsqrt_rn(sum / (float)H + a.eps);
  for (int i = threadIdx.x; i < H / 8; i += THREADS) {
    float x[8], gain[8];
    unpack(x, load_l2(a.out + start + 16 * i, uint4()));
    load_vector(gain, a.next_norm, 8 * i, a.flags & NEXT_NORM_FP32);
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = x[k] * r * gain[k];
    *(uint4*)(a.normed + start + 16 * i) = pack(x);
  }
}
#endif
