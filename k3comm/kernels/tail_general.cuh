// The exchange of tail_fusion.cu on the general path, which runs everywhere: weights into registers, mma.sync. A part of
// that file and of nothing else; it knows all that stands there in front of it.

// ---- the latent sums -----------------------------------------------------------------------------------------------

constexpr int STEPS = SLICE / 32;                                   // of 32 columns, in the product
constexpr int PITCH = ((SLICE / 32) | 1) * 64;  // bytes of a row of z: an odd multiple of 64, so that the eight threads
                                                // of a quarter-warp (two rows, 64 bytes each) never share a bank
// Token tiles that a warp multiplies at once, and steps of weights that it has in flight: what fits in 128 registers.
constexpr int TOKEN_TILES = TOKENS / 8, PASS = TOKEN_TILES < 4 ? TOKEN_TILES : 4, AHEAD = PASS < 4 ? 4 : 2;

// s = sum over ranks of this CTA's slice, all rows: s * g into shared memory as two terms [2, TOKENS, PITCH bytes], and
// the squares of s, a sum a fragment, as [TOKENS, FRAGMENTS]. Columns past L are zeros.
DEVICE void reduce_latent(const Arguments& a, u64 call, int region, int slice, char* z, float* squares) {
  const Waiting w = waiting(a, call);
  for (int i = threadIdx.x; i < a.rows * FRAGMENTS; i += THREADS) {
    const int token = i / FRAGMENTS, fragment = i % FRAGMENTS, column = slice * SLICE + 8 * fragment;
    uint4 high = make_uint4(0, 0, 0, 0), low = high;
    float square = 0.0f;
    if (column < L) {
      float gain[8], s[8];
      if (a.norm) load_vector(gain, a.norm, column, a.flags & NORM_FP32);
      add_ranks<0, uint4>(s, latent_slots(a, region, token, column), w, PHASE_LATENT, token);
#pragma unroll
      for (int k = 0; k < 8; k++) square = __fmaf_rn(s[k], s[k], square);
      if (a.norm) {
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] = __fmul_rn(s[k], gain[k]);
      }
      split(s, high, low);
    }
    *(uint4*)(z + token * PITCH + 16 * fragment) = high;
    *(uint4*)(z + (TOKENS + token) * PITCH + 16 * fragment) = low;
    squares[token * FRAGMENTS + fragment] = square;
  }
}

// The mean square's share of this slice, in one order whatever m is. Each group keeps its own, so that no group waits
// for another one's.
DEVICE void sum_squares(const Arguments& a, int group, int slice, const float* squares) {
  const int lane = threadIdx.x & 31;
  for (int token = threadIdx.x >> 5; token < a.rows; token += WARPS) {
    float sum = 0.0f;
    for (int i = lane; i < FRAGMENTS; i += 32) sum += squares[token * FRAGMENTS + i];
#pragma unroll
    for (int k = 16; k; k >>= 1) sum += __shfl_xor_sync(~0u, sum, k);
    if (FLAGGED || lane == 0) put_square(a, group, slice, token, sum);
  }
}

// ---- the projection ------------------------------------------------------------------------------------------------

// Two rows of W_up, g and g + 8 of a tile, eight columns each, where there are any.
DEVICE void load_step(uint4 (&v)[2], const Arguments& a, int row, int column) {
  v[0] = v[1] = make_uint4(0, 0, 0, 0);
  if (column >= L) return;
  const char* p = a.weight + 2 * (row * a.weight_stride + column);
  if (row < C) v[0] = load_weight(p);
  if (row + 8 < C) v[1] = load_weight(p + 16 * a.weight_stride);
}

// Before the wait: the lines that each warp's first steps read. No more: a burst of the whole shard fills the memory
// system's queues and every small access waits behind it.
DEVICE void prefetch_weights(const Arguments& a, int group, int slice) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = (group * GROUP_TILES + warp) * 16 + (lane >> 1), column = slice * SLICE + 64 * (lane & 1);
  if (warp < GROUP_TILES && row < C && column < L && column < (slice + 1) * SLICE)
    prefetch_l2(a.weight + 2 * (row * a.weight_stride + column));
}

// Partial products [m, C] of this CTA's columns and slice. A thread loads 16 bytes of a weight row and of a row of z at
// the same place: the order of k within 32 columns is the tensor core's business as long as both agree, so fragments
// need no shuffling. In lane (g, t) word pair 0 of the 16 bytes is the first k16 step, word pair 1 the second.
DEVICE void project(const Arguments& a, int group, int slice, const char* z) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int last = min(TILES, (group + 1) * GROUP_TILES);
  for (int tile = group * GROUP_TILES + (threadIdx.x >> 5); tile < last; tile += WARPS) {
    const int row = tile * 16 + g, column = slice * SLICE + 8 * t;
    for (int pass = 0; pass < TOKEN_TILES / PASS && pass * PASS * 8 < a.rows; pass++) {
      float high[PASS][4] = {}, low[PASS][4] = {};
      uint4 weights[AHEAD][2];
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (i < STEPS) load_step(weights[i], a, row, column + 32 * i);
      const char* rows = z + (pass * PASS * 8 + g) * PITCH + 16 * t;
#pragma unroll 1
      for (int step0 = 0; step0 < STEPS; step0 += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          const int step = step0 + i;
          if (step < STEPS) {
            const uint4 upper = weights[i][0], lower = weights[i][1];
            if (step + AHEAD < STEPS) load_step(weights[i], a, row, column + 32 * (step + AHEAD));
#pragma unroll
            for (int n = 0; n < PASS; n++) {
              const uint4 b = *(const uint4*)(rows + n * 8 * PITCH + 64 * step);
              mma(high[n], upper.x, lower.x, upper.y, lower.y, b.x, b.y);
              mma(high[n], upper.z, lower.z, upper.w, lower.w, b.z, b.w);
              const uint4 c = *(const uint4*)(rows + (TOKENS + n * 8) * PITCH + 64 * step);
              mma(low[n], upper.x, lower.x, upper.y, lower.y, c.x, c.y);
              mma(low[n], upper.z, lower.z, upper.w, lower.w, c.z, c.w);
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < PASS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int token = (pass * PASS + n) * 8 + 2 * t + (i & 1), to = row + 8 * (i >> 1);
          if (token < a.rows && to < C) put_product(a, slice, token, to, high[n][i] + low[n][i]);
        }
    }
  }
}

// ---- exchange: stages 1 to 4 ---------------------------------------------------------------------------------------

// Returns the number of this call.
DEVICE u64 exchange(const Arguments& a) {
  extern __shared__ __align__(128) char memory[];
  __shared__ u64 said[2];  // the number of the call; what the call before used
  char* z = memory;
  float* squares = (float*)(memory + 2 * TOKENS * PITCH);
  const int group = blockIdx.x / SLICES, slice = blockIdx.x % SLICES;
  // The number is taken before the next kernel may start, by one step on this CTA's own cell.
  if (threadIdx.x == 0) {
    const u64 mine = step(&a.counters->cells[blockIdx.x]);
    begin(a, said, mine, acquire(&a.counters->credited));
  }
  prefetch_weights(a, group, slice);
  expect_published(a);
  __syncthreads();
  const u64 call = said[0];
  const int region = (int)(call % 3);
  launch_dependents();
  wait_for_predecessor();
  if (threadIdx.x == THREADS - 1) said[1] = turn(a, call);
  publish<true, true>(a, region);
  reduce_latent(a, call, region, slice, z, squares);
  __syncthreads();
  clear(a, (u32)said[1], region);
  if (!FLAGGED) sum_squares(a, group, slice, squares);
  project(a, group, slice, z);
  if (FLAGGED) sum_squares(a, group, slice, squares);  // earlier, and registers spill
  return call;
}
