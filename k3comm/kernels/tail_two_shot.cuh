// Stage 3 of many rows in two shots: a part of tail_hopper.cuh, and of nothing else.
//
// A CTA sums, of its own slice, every GROUPS-th row, and leaves s * g as two terms in global memory, as z lies in shared
// memory. When all groups have left theirs of a slice, a warp of each CTA loads z of that slice, stripe after stripe, while
// the tensor cores are at the ones before. One trip through the L2 cache more; nobody sums what another group has summed,
// and z needs room for Z_RING stripes only, so that more of the weights fit.
//
// Behind the squares in this rank's own memory: u64 [SLICES, GROUPS], one more than the number of the last call in which
// that group's rows are there, zeros at the start; the rows' squares, fp32 [SLICES, MAX_ROWS]; z [SLICES, STRIPES, N, 128
// bytes], swizzled. z comes last: its size depends on TOKENS, and the variants share one workspace. Call n writes squares
// and z once all calls before are done whole.

DEVICE u64* summed_of(const Arguments& a, int slice) {
  return (u64*)(a.squares + GROUPS * MAX_ROWS * SLICES) + slice * GROUPS;
}
DEVICE float* row_squares_of(const Arguments& a, int slice) {
  return (float*)((char*)summed_of(a, 0) + (8 * CELLS + 127) / 128 * 128) + slice * MAX_ROWS;
}
DEVICE char* terms_of(const Arguments& a, int slice) {
  return (char*)row_squares_of(a, SLICES) + (u64)slice * STRIPES * Z_STRIPE;
}

DEVICE void sum_share(const Arguments& a, u64 call, int region, int group, int slice, char* memory) {
  const Waiting w = waiting(a, call);
  constexpr int UNITS = SHARE * FRAGMENTS, TURNS = (UNITS + THREADS - 1) / THREADS;
  float* squares = (float*)(memory + SQUARES);
  float s[TURNS][8] = {}, gain[TURNS][8] = {};
  const auto token_of = [&](int turn) { return (turn * THREADS + (int)threadIdx.x) / FRAGMENTS * GROUPS + group; };
  const auto fragment_of = [&](int turn) { return (turn * THREADS + (int)threadIdx.x) % FRAGMENTS; };
  const auto some = [&](int turn) { return turn * THREADS + (int)threadIdx.x < UNITS && token_of(turn) < a.rows; };
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int column = slice * SLICE + 8 * fragment_of(i);
    if (a.norm && some(i)) load_vector(gain[i], a.norm, column, a.flags & NORM_FP32);
    if (some(i)) add_ranks<0, uint4>(s[i], latent_slots(a, region, token_of(i), column), w, PHASE_LATENT, token_of(i));
  }
  if (threadIdx.x == 0) set_shared((u32*)(memory + PROGRESS), FIRST_ROWS_IN);
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const float square = square_of(s[i]);
    const int fragment = fragment_of(i);
    if (some(i) && (fragment & 7) == 0) squares[token_of(i) / GROUPS * STRIPES + (fragment >> 3)] = square;
  }
  sync_block();  // thread THREADS - 1 has been in `turn`: nobody reads the z of the calls before any more
  if (const int token = threadIdx.x * GROUPS + group; threadIdx.x < SHARE && token < a.rows)
    row_squares_of(a, slice)[token] = sum_stripes(squares + threadIdx.x * STRIPES);
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    if (!some(i)) continue;
    const int fragment = fragment_of(i), stripe = fragment >> 3;
    if (a.norm) {
#pragma unroll
      for (int k = 0; k < 8; k++) s[i][k] = __fmul_rn(s[i][k], gain[i][k]);
    }
    uint4 high, low;
    split(s[i], high, low);
    char* z = terms_of(a, slice) + stripe * Z_STRIPE;
    const int token = token_of(i), under = TOKENS + token;
    *(uint4*)(z + (token >> 3) * 1024 + swizzled(token & 7, fragment & 7)) = high;
    *(uint4*)(z + (under >> 3) * 1024 + swizzled(under & 7, fragment & 7)) = low;
  }
  fence_loads();
  sync_block();
  if (threadIdx.x == 0) store_release(summed_of(a, slice) + group, call + 1);
}

// A warp: waits for all groups' rows of this slice and loads them. Twice the deadline: who waits for data says better what
// is missing.
DEVICE void load_terms(const Arguments& a) {
  extern __shared__ __align__(1024) char memory[];
  const int lane = threadIdx.x & 31, slice = blockIdx.x % SLICES;
  const u32 base = shared_address(memory);
  __syncthreads();
  while (look_shared((const u32*)(memory + PROGRESS)) < FIRST_ROWS_IN) __nanosleep(100);
  const u64 call = *(volatile u64*)(memory + NUMBER);
  Waiting w = waiting(a, call);
  w.deadline_ns *= 2;
  for (int i = lane; i < GROUPS; i += 32) {
    Patience patience;
    while (acquire(summed_of(a, slice) + i) <= call) patience.lose(w, PHASE_PARTIALS, 0, w.rank);
  }
  __syncwarp();
  if (lane) return;
  fence_loads();
  for (int i = 0; i < STRIPES; i++) {
    if (i == Z_RING) set_shared((u32*)(memory + PROGRESS), Z_ON_ITS_WAY);  // no weights in front of these
    if (i >= Z_RING) barrier_wait(base + Z_FREE + 8 * (i % Z_RING), i / Z_RING + 1 & 1);
    barrier_expect(base + Z_LANDED + 8 * (i % Z_RING), Z_STRIPE);
    load_bytes(base + Z + i % Z_RING * Z_STRIPE, terms_of(a, slice) + i * Z_STRIPE, Z_STRIPE,
               base + Z_LANDED + 8 * (i % Z_RING));
  }
  if (Z_RING == STRIPES) set_shared((u32*)(memory + PROGRESS), Z_ON_ITS_WAY);
}
