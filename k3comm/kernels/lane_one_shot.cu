// The one-shot all-reduce of a lane, with the latent norm in its epilogue:
//   z = bf16(s * rsqrt(mean(s^2) + eps) * g), s = sum_r lane_r[:, :L]                                  [m, L]
//   shared = sum_r lane_r[:, L:]                                                                       [m, H], fp32
// Sums are fp32, in rank order. A lane is [m, L + H], rows contiguous, in memory that every rank can read.
//
// The work falls into units: a row's latent part, which one CTA norms by itself, and pieces of THREADS fragments of its
// shared part. CTA b takes the units b, b + grid, ... of every rank's lane, and copies the same units of this rank's
// partial sums into its lane first, where the experts have not written them there. So all that a CTA reads of a peer was
// staged either by the peer's CTA b or by kernels before it, and the ranks meet CTA by CTA, through words of their own:
//   2 n + 1  CTA b of call n has started, and its units are in the lane: release at system scope, after a barrier of
//            the CTA, so it covers what all its threads stored, and whatever kernels in front of this one did;
//   2 n + 2  it has read the peers' lanes: after the last unit's sums. Who has this from every peer may end, and what
//            comes next on the stream may write to the lane.
// Whoever waits acquires at system scope, and a barrier of the CTA passes that on to the threads that read. They read
// past the L1 cache. The words count calls, so nothing is reset, and graphs and eager calls are one sequence.
//
// The grid is the same for every m and on every rank, since each CTA counts the calls in a cell of its own; it is
// resident as a whole, and no CTA waits for another one of its rank, so no rank waits in a ring. A row's bits depend on
// nothing but the row.
#include "mailbox.cuh"

constexpr int H = K3_HIDDEN, L = K3_LATENT, W = K3_WORLD;
constexpr int THREADS = K3_THREADS, WARPS = THREADS / 32;
constexpr int SPAN = (L / 8 + THREADS - 1) / THREADS;       // fragments of a latent row a thread
constexpr int UNITS = 1 + (H / 8 + THREADS - 1) / THREADS;  // of a row; the first one is the latent part
constexpr int AT_ONCE = 8;                                  // ranks whose fragments are in flight at once

static_assert(H % 8 == 0 && L % 8 == 0 && W >= 2 && W <= 16 && THREADS % 32 == 0 && THREADS >= W);
static_assert(sizeof(Counters) == K3_COUNTER_BYTES);

enum LanePhase : u32 { PHASE_STAGED = 16, PHASE_READ = 17 };  // beside those of mailbox.cuh
enum Flag : u32 { NORM_FP32 = 1 };

// Made by `Arguments` in lane_one_shot.py. Strides are elements; addresses of rank p's memory are as this rank sees it.
struct Arguments {
  const char* lanes[16];     // the lane of rank p
  u64* words[16];            // in rank p's memory: this rank's words there, one a CTA
  const u64* own_words;      // in this rank's memory: [W, MAX_CELLS], a row a peer
  char* lane;                // this rank's lane
  Counters* counters;
  Record* record;
  u64 deadline_ns;
  const char* routed;        // [m, L], or null: it is in the lane
  const char* shared;        // [m, H], likewise
  const char* norm;          // [L], or null
  char* z;                   // [m, L] BF16, contiguous
  float* sums;               // [m, H] fp32, contiguous
  i64 routed_stride, shared_stride;
  int rank, rows, layer;
  u32 flags;
  float eps;
  u32 spare;
};
static_assert(sizeof(Arguments) == K3_ARGUMENT_BYTES);

DEVICE Waiting waiting(const Arguments& a, u64 call) {
  return {a.counters, a.record, a.deadline_ns, call, MOE_TAIL, (u32)a.layer, (u32)a.rank};
}

// The column of this thread's fragment number j in its part of a row; negative where it has none.
DEVICE int column_of(int part, int j) {
  if (part && j) return -1;
  const int column = 8 * ((part ? part - 1 : j) * THREADS + (int)threadIdx.x);
  return column < (part ? H : L) ? column : -1;
}
DEVICE u64 place_of(int row, int part, int column) { return 2 * ((u64)row * (L + H) + (part ? L : 0) + column); }

// Nothing of this call is written before every call in front of it is done whole on this rank.
DEVICE void enter(const Arguments& a, u64 call) {
  if (threadIdx.x == 0) wait_completed(waiting(a, call));
  __syncthreads();
}

// Copies this CTA's units into the lane, where they are not there yet. The first one's payload is asked for before the
// entry, which hides one of the two.
DEVICE void stage(const Arguments& a, u64 call) {
  const int units = a.rows * UNITS;
  for (int unit = blockIdx.x;; unit += gridDim.x) {
    const int row = unit / UNITS, part = unit % UNITS;
    const char* from = part ? a.shared : a.routed;
    const bool some = unit < units && from;
    uint4 v[SPAN];
#pragma unroll
    for (int j = 0; j < SPAN; j++) {
      const int column = column_of(part, j);
      v[j] = make_uint4(0, 0, 0, 0);
      if (some && column >= 0)
        v[j] = load_l2(from + 2 * (row * (part ? a.shared_stride : a.routed_stride) + column), uint4());
    }
    if (unit == (int)blockIdx.x) enter(a, call);
    if (unit >= units) return;
#pragma unroll
    for (int j = 0; j < SPAN; j++) {
      const int column = column_of(part, j);
      if (some && column >= 0) store_sys(a.lane + place_of(row, part, column), v[j]);
    }
  }
}

// Of the threads of a CTA the first W speak, one to each peer.
DEVICE bool speaks(const Arguments& a) { return threadIdx.x < W && (int)threadIdx.x != a.rank; }
DEVICE void tell(const Arguments& a, u64 word) {
  if (speaks(a)) release_sys(a.words[threadIdx.x] + blockIdx.x, word);
}
DEVICE void hear(const Arguments& a, u64 call, u64 word, u32 phase) {
  if (!speaks(a)) return;
  const u64* place = a.own_words + threadIdx.x * MAX_CELLS + blockIdx.x;
  Patience patience;
  while (acquire_sys(place) < word) patience.lose(waiting(a, call), phase, blockIdx.x / UNITS, threadIdx.x);
}

template <int FIRST> DEVICE void add_ranks(float (&sum)[8], const Arguments& a, u64 place) {
  constexpr int COUNT = W - FIRST < AT_ONCE ? W - FIRST : AT_ONCE;
  uint4 v[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) v[i] = load_sys(a.lanes[FIRST + i] + place, uint4());
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float x[8];
    unpack(x, v[i]);
#pragma unroll
    for (int k = 0; k < 8; k++) sum[k] = FIRST + i ? __fadd_rn(sum[k], x[k]) : x[k];
  }
  if constexpr (FIRST + COUNT < W) add_ranks<FIRST + COUNT>(sum, a, place);
}

DEVICE void load_gain(float (&gain)[8], const Arguments& a, int column) {
  if (a.flags & NORM_FP32) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 v = load_l2(a.norm + 4 * column + 16 * i, uint4());
      gain[4 * i] = __uint_as_float(v.x), gain[4 * i + 1] = __uint_as_float(v.y);
      gain[4 * i + 2] = __uint_as_float(v.z), gain[4 * i + 3] = __uint_as_float(v.w);
    }
  } else {
    unpack(gain, load_l2(a.norm + 2 * column, uint4()));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) lane_one_shot(const __grid_constant__ Arguments a) {
  __shared__ u64 number;
  __shared__ float squares[2 * WARPS];  // by turns, so that one barrier a unit does
  if (threadIdx.x == 0) number = step(&a.counters->cells[blockIdx.x]);
  __syncthreads();
  const u64 call = number;
  launch_dependents();
  wait_for_predecessor();
  stage(a, call);
  const int units = a.rows * UNITS, grid = gridDim.x;
  if ((int)blockIdx.x < units) {
    float gain[SPAN][8];
    if (a.norm && (blockIdx.x % UNITS == 0 || units > grid)) {
#pragma unroll
      for (int j = 0; j < SPAN; j++) {
        const int column = column_of(0, j);
        if (column >= 0) load_gain(gain[j], a, column);
      }
    }
    __syncthreads();
    tell(a, 2 * call + 1);
    hear(a, call, 2 * call + 1, PHASE_STAGED);
    __syncthreads();
    int turn = 0;
    for (int unit = blockIdx.x; unit < units; unit += grid) {
      const int row = unit / UNITS, part = unit % UNITS;
      float s[SPAN][8];
      float square = 0.0f;
#pragma unroll
      for (int j = 0; j < SPAN; j++) {
        const int column = column_of(part, j);
        if (column < 0) continue;
        add_ranks<0>(s[j], a, place_of(row, part, column));
        if (part) {
          float4* to = (float4*)(a.sums + (u64)row * H + column);
          to[0] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
          to[1] = make_float4(s[j][4], s[j][5], s[j][6], s[j][7]);
        } else {
#pragma unroll
          for (int k = 0; k < 8; k++) square = __fmaf_rn(s[j][k], s[j][k], square);
        }
      }
      if (!part) {
#pragma unroll
        for (int k = 16; k; k >>= 1) square += __shfl_xor_sync(~0u, square, k);
        if ((threadIdx.x & 31) == 0) squares[turn + (threadIdx.x >> 5)] = square;
      }
      __syncthreads();
      if (unit + grid >= units) tell(a, 2 * call + 2);
      if (!part) {
        float r = 1.0f;
        if (a.norm) {
          float total = squares[turn];
#pragma unroll
          for (int i = 1; i < WARPS; i++) total += squares[turn + i];
          r = __frsqrt_rn(total / (float)L + a.eps);
        }
#pragma unroll
        for (int j = 0; j < SPAN; j++) {
          const int column = column_of(0, j);
          if (column < 0) continue;
          if (a.norm) {
#pragma unroll
            for (int k = 0; k < 8; k++) s[j][k] = s[j][k] * r * gain[j][k];
          }
          *(uint4*)(a.z + 2 * ((u64)row * L + column)) = pack(s[j]);
        }
      }
      turn = WARPS - turn;
    }
    hear(a, call, 2 * call + 2, PHASE_READ);
  }
  __syncthreads();
  if (threadIdx.x == 0) add_release(&a.counters->completed, blockIdx.x ? 1 : COMPLETIONS - (gridDim.x - 1));
}
