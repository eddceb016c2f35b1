// The exchange of tail_fusion.cu on sm_90a's path: weights by TMA into shared memory, wgmma. A part of that file and of
// nothing else; it knows all that stands there in front of it.

constexpr int GROUP_ROWS = 16 * GROUP_TILES;                        // output columns of a group: rows of its weights
constexpr int BOX_ROWS = K3_BOX_ROWS, BOX_BYTES = 128 * BOX_ROWS;   // a box: so many rows of 64 columns
constexpr int STRIPES = SLICE / 64, PARTS = GROUP_ROWS / BOX_ROWS, BOXES = STRIPES * PARTS;
constexpr int M_TILES = (GROUP_ROWS + 63) / 64;                     // of 64 rows, one a warpgroup; the last may overlap
constexpr int N = 2 * TOKENS;                                       // columns of z: high terms, then low terms
constexpr int AT_A_TIME = THREADS / FRAGMENTS;                      // tokens whose fragments have a thread each
constexpr int PER_TILE = (TOKENS + AT_A_TIME - 1) / AT_A_TIME;      // tokens that a thread has columns of,
constexpr int BATCH = PER_TILE < 8 / W ? PER_TILE : W < 8 ? 8 / W : 1;  // of which so many are asked for at once
// Weights lie in a ring of RING stripes of 64 columns: all of them where they fit beside z, else those that the tensor
// cores are done with make room.
constexpr int RING = K3_RING, RING_BOXES = RING * PARTS;
// In two shots a CTA sums some rows of its slice for all groups; z comes from global memory, in a ring of its own.
constexpr int SHARE = (TOKENS + GROUPS - 1) / GROUPS;               // rows that a CTA sums then
constexpr int Z_RING = K3_TWO_SHOT ? K3_Z_RING : STRIPES, Z_STRIPE = N * 128;

static_assert(GROUPS * GROUP_ROWS == C && SLICES * SLICE == L && SLICE % 64 == 0 && GROUP_ROWS >= 64);
static_assert(GROUP_ROWS % BOX_ROWS == 0 && BOX_ROWS % 8 == 0 && THREADS >= 128 * M_TILES && AT_A_TIME > 0);
static_assert(TOKENS == 4 || TOKENS == 8 || TOKENS == 16 || TOKENS == 32 || TOKENS == 64);
static_assert(RING == STRIPES || (RING > 1 && RING < STRIPES));
static_assert(Z_RING == STRIPES || (Z_RING > 1 && Z_RING < STRIPES));

// Shared memory: weights [RING, GROUP_ROWS, 128 bytes], z [Z_RING, N, 128 bytes], both swizzled; squares of 64 columns
// [rows that it sums, STRIPES]; a barrier a box of the ring, and a stripe of it; in two shots two a stripe of z; the number
// of the call; Progress; what the call before used.
//
// Progress tells the warps that load how far the block is, 0 at first. Thread 0 sets the first two, and the others are about
// as far; the third comes from the warp that loads z, which has waited for the second.
enum Progress : u32 { KERNEL_BEFORE_OVER = 1, FIRST_ROWS_IN = 2, Z_ON_ITS_WAY = 3 };
constexpr u32 OPEN = K3_TWO_SHOT ? Z_ON_ITS_WAY : FIRST_ROWS_IN;  // nothing small waits behind weights from then on
constexpr int Z = RING_BOXES * BOX_BYTES, SQUARES = Z + Z_RING * Z_STRIPE;
constexpr int LANDED = SQUARES + (4 * (K3_TWO_SHOT ? SHARE : TOKENS) * STRIPES + 7) / 8 * 8, FREE = LANDED + 8 * RING_BOXES;
constexpr int Z_LANDED = FREE + 8 * RING, Z_FREE = Z_LANDED + (K3_TWO_SHOT ? 8 * Z_RING : 0);
constexpr int NUMBER = Z_FREE + (K3_TWO_SHOT ? 8 * Z_RING : 0), PROGRESS = NUMBER + 8, USED = PROGRESS + 4;
static_assert(USED + 4 == K3_SHARED_BYTES && LANDED % 8 == 0);

// The loading warp. It touches nothing but weights, so it waits for no other kernel, unless they were made just now.
DEVICE void load_weights(const Arguments& a) {
  extern __shared__ __align__(1024) char memory[];
  const int lane = threadIdx.x & 31, group = blockIdx.x / SLICES, slice = blockIdx.x % SLICES;
  const u32 weights = shared_address(memory);
  u32* progress = (u32*)(memory + PROGRESS);
  if (lane == 0) {
    for (int i = 0; i < RING_BOXES; i++) barrier_init(weights + LANDED + 8 * i, 1);
    for (int i = 0; i < RING; i++) barrier_init(weights + FREE + 8 * i, 4 * M_TILES);
#if K3_TWO_SHOT
    for (int i = 0; i < Z_RING; i++) {
      barrier_init(weights + Z_LANDED + 8 * i, 1);
      barrier_init(weights + Z_FREE + 8 * i, 4 * M_TILES);
    }
#endif
    set_shared(progress, 0);
    barrier_init_done();
  }
  __syncwarp();
  __syncthreads();
#if !K3_NO_WEIGHTS
  if (lane == 0) {
    if (a.flags & FRESH_WEIGHTS) wait_for_predecessor();
    const u64 policy = evict_first();
    int window = a.window;
    for (int i = 0; i < BOXES; i++) {
      while (i >= window && !barrier_passed(weights + LANDED + 8 * ((i - window) % RING_BOXES), (i - window) / RING_BOXES & 1))
        if (const u32 now = look_shared(progress)) window = now == OPEN ? BOXES : a.poll_window;
      const int stripe = i / PARTS, place = i % RING_BOXES;
      if (stripe >= RING) barrier_wait(weights + FREE + 8 * (stripe % RING), stripe / RING + 1 & 1);
      barrier_expect(weights + LANDED + 8 * place, BOX_BYTES);
      load_box(weights + place * BOX_BYTES, &a.boxes, slice * SLICE + stripe * 64,
               group * GROUP_ROWS + i % PARTS * BOX_ROWS, weights + LANDED + 8 * place, policy);
    }
  }
#endif
}

// Of eight lanes side by side, which have 64 columns.
DEVICE float square_of(const float (&s)[8]) {
  float square = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; k++) square = __fmaf_rn(s[k], s[k], square);
#pragma unroll
  for (int k = 1; k < 8; k *= 2) square += __shfl_xor_sync(~0u, square, k);
  return square;
}

// Of the 64 columns of each stripe.
DEVICE float sum_stripes(const float* squares) {
  float sum = squares[0];
#pragma unroll
  for (int i = 1; i < STRIPES; i++) sum += squares[i];
  return sum;
}

#if K3_TWO_SHOT
#include "tail_two_shot.cuh"
#else
// Fragments of every rank for some rows of the same columns, every AT_A_TIME-th from `at` on as far as there are any.
struct Mail { uint4 v[BATCH][W]; };
DEVICE void fetch_mail(Mail& mail, const Arguments& a, int region, int column, int tokens, int at, const Waiting& w) {
#pragma unroll
  for (int b = 0; b < BATCH; b++) {
    const int token = at + b * AT_A_TIME;
    const Slots from = latent_slots(a, region, token, column);
#pragma unroll
    for (int r = 0; r < W; r++) {
      mail.v[b][r] = make_uint4(0, 0, 0, 0);
      if (token < tokens) mail.v[b][r] = load_sys(from.of(r), uint4());
    }
  }
  Patience patience;
  while (true) {
    int missing = -1;
#pragma unroll
    for (int b = BATCH - 1; b >= 0; b--) {
      const Slots from = latent_slots(a, region, at + b * AT_A_TIME, column);
#pragma unroll
      for (int r = W - 1; r >= 0; r--)
        if (from.missing(r, mail.v[b][r])) missing = b * W + r;
    }
    if (missing < 0) return;
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const Slots from = latent_slots(a, region, at + b * AT_A_TIME, column);
#pragma unroll
      for (int r = 0; r < W; r++)
        if (from.missing(r, mail.v[b][r])) mail.v[b][r] = load_sys(from.of(r), uint4());
    }
    patience.lose(w, PHASE_LATENT, at + missing / W * AT_A_TIME, missing % W);
  }
}

// s = sum over ranks of this CTA's slice, all rows: s * g as two terms into z, and the squares of s. A thread has the same
// columns of every AT_A_TIME-th row; `gain` are theirs of g.
DEVICE void reduce_latent(const Arguments& a, u64 call, int region, int slice, const float (&gain)[8], char* memory) {
  const Waiting w = waiting(a, call);
  const int fragment = threadIdx.x % FRAGMENTS, mine = threadIdx.x / FRAGMENTS;
  const int tokens = mine < AT_A_TIME ? a.rows : 0;
  const int column = slice * SLICE + 8 * fragment;
  char* z = memory + Z + (fragment >> 3) * Z_STRIPE;
  float* squares = (float*)(memory + SQUARES);
  // Whole warps go through it, since they meet below.
  for (int at = mine; at - mine < a.rows; at += BATCH * AT_A_TIME) {
    float s[BATCH][8] = {};
    if constexpr (BATCH > 1) {
      Mail mail;
      fetch_mail(mail, a, region, column, tokens, at, w);
#pragma unroll
      for (int b = 0; b < BATCH; b++) add<0>(s[b], mail.v[b]);
    } else if (at < tokens) {
      add_ranks<0, uint4>(s[0], latent_slots(a, region, at, column), w, PHASE_LATENT, at);
    }
    if (threadIdx.x == 0) set_shared((u32*)(memory + PROGRESS), FIRST_ROWS_IN);
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const int token = at + b * AT_A_TIME;
      const float square = square_of(s[b]);
      if (token >= tokens) continue;
      if ((fragment & 7) == 0) squares[token * STRIPES + (fragment >> 3)] = square;
      if (a.norm) {
#pragma unroll
        for (int k = 0; k < 8; k++) s[b][k] = __fmul_rn(s[b][k], gain[k]);
      }
      uint4 high, low;
      split(s[b], high, low);
      const int under = TOKENS + token;
      *(uint4*)(z + (token >> 3) * 1024 + swizzled(token & 7, fragment & 7)) = high;
      *(uint4*)(z + (under >> 3) * 1024 + swizzled(under & 7, fragment & 7)) = low;
    }
  }
  fence_operands();
}

#endif

// The mean square's share of this slice, for who finishes this group's columns: in one kernel that waits for its own group
// alone, so in two shots each group has a copy.
DEVICE void sum_squares(const Arguments& a, int group, int slice, const char* memory) {
  const auto square_of_row = [&](int token) {
#if K3_TWO_SHOT
    return __uint_as_float(load_l2(row_squares_of(a, slice) + token, u32()));
#else
    return sum_stripes((const float*)(memory + SQUARES) + token * STRIPES);
#endif
  };
  // The last warps have the fewest columns to publish. In two shots only those that multiply know that the sums are there.
  constexpr int ABLE = K3_TWO_SHOT ? 128 * M_TILES : THREADS;
  const int back = ABLE - 1 - (int)threadIdx.x;
  if (back < 0) return;
  for (int token = FLAGGED ? back >> 5 : back; token < min(TOKENS, a.rows); token += FLAGGED ? WARPS : ABLE)
    put_square(a, group, slice, token, square_of_row(token));
}

// Partial products [m, C] of this CTA's columns and slice. The order over k is one for all TOKENS. `beside` is done by all
// threads while the tensor cores are at it. Those of warps that multiply come there when z is in shared memory; others may
// come earlier.
template <typename Beside>
DEVICE void project(const Arguments& a, int group, int slice, char* memory, Beside beside) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3;  // a warpgroup, and a warp of it
  if (tile >= M_TILES) return beside();
  const int row = min(64 * tile, GROUP_ROWS - 64);
  const u32 weights = shared_address(memory);
  const u64 left = operand(weights + 128 * row), right = operand(weights + Z);
  float sum[TOKENS] = {};
#pragma unroll
  for (int i = 0; i < STRIPES; i++) {
#if K3_TWO_SHOT
    barrier_wait(weights + Z_LANDED + 8 * (i % Z_RING), i / Z_RING & 1);
#endif
#if !K3_NO_WEIGHTS
    barriers_wait<PARTS>(weights + LANDED + 8 * (i % RING * PARTS), i / RING & 1);
#endif
    product_begin();
#pragma unroll
    for (int k = 0; k < 4; k++)
      product(sum, left + ((i % RING * GROUP_ROWS * 128 + 32 * k) >> 4), right + ((i % Z_RING * Z_STRIPE + 32 * k) >> 4));
    product_commit();
    if (i > 0 && i - 1 + min(RING, Z_RING) < STRIPES) {  // the stripe before makes room
      product_wait<1>(sum);
      if (lane == 0 && i - 1 + RING < STRIPES) barrier_arrive(weights + FREE + 8 * ((i - 1) % RING));
      if (lane == 0 && i - 1 + Z_RING < STRIPES) barrier_arrive(weights + Z_FREE + 8 * ((i - 1) % Z_RING));
    }
  }
  beside();
  product_wait<0>(sum);
  if (row + 16 * warp < 64 * tile) return;  // the tile before has these
  const int to = group * GROUP_ROWS + row + 16 * warp + g;
  constexpr int HALF = TOKENS / 8;
#pragma unroll
  for (int n = 0; n < (HALF ? HALF : 1); n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v;
      // Four tokens: high and low terms are columns of one tile of eight, two lanes apart.
      if constexpr (HALF == 0) v = sum[i] + __shfl_xor_sync(~0u, sum[i], 2);
      else v = sum[4 * n + i] + sum[4 * (n + HALF) + i];
      const int token = 8 * n + 2 * t + (i & 1);
      if (token < TOKENS && token < a.rows) put_product(a, slice, token, to + 8 * (i >> 1), v);
    }
}

// The warps behind the first THREADS.
DEVICE void load(const Arguments& a) {
#if K3_TWO_SHOT
  if (threadIdx.x >= THREADS + 32) return load_terms(a);
#endif
  load_weights(a);
}

DEVICE u64 exchange(const Arguments& a) {
  extern __shared__ __align__(1024) char memory[];
  const int group = blockIdx.x / SLICES, slice = blockIdx.x % SLICES;
  u64* number = (u64*)(memory + NUMBER);
  u64 mine = 0, credited = 0;
  if (threadIdx.x == 0) {
    mine = step(&a.counters->cells[blockIdx.x]);
    credited = acquire(&a.counters->credited);
  }
  const int column = slice * SLICE + 8 * (threadIdx.x % FRAGMENTS);
  if (a.norm) prefetch_l2(a.norm + (a.flags & NORM_FP32 ? 4 : 2) * column);
  __syncthreads();  // the barriers are there; the loads begin
  expect_published(a);
  if (threadIdx.x == 0) begin(a, number, mine, credited);
  sync_block();
  const u64 call = *number;
  const int region = (int)(call % 3);
  launch_dependents();
  wait_for_predecessor();
  if (threadIdx.x == 0) set_shared((u32*)(memory + PROGRESS), KERNEL_BEFORE_OVER);
  if (threadIdx.x == THREADS - 1) *(u32*)(memory + USED) = turn(a, call);
  // Many rows of latent take a while on a link, and are waited for; the products give shared ones time.
  constexpr bool SHARED_AT_ONCE = TOKENS <= 16;
  publish<true, SHARED_AT_ONCE>(a, region);
#if K3_TWO_SHOT
  sum_share(a, call, region, group, slice, memory);
#else
  float gain[8] = {};
  if (a.norm) load_vector(gain, a.norm, column, a.flags & NORM_FP32);
  reduce_latent(a, call, region, slice, gain, memory);
  sync_block();
#endif
  project(a, group, slice, memory, [&] {
    if (!SHARED_AT_ONCE) publish<false, true>(a, region);
    sum_squares(a, group, slice, memory);
    clear(a, *(const u32*)(memory + USED), region);
  });
  return call;
}
