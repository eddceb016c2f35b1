// Stages 5 to 7 of tail_fusion.cu, a part of that file and of nothing else: what becomes of the slices' products.

// Work in units of four owned columns of one row; unit i is row i / per_row, columns 4 * (first + i % per_row) on.
struct Units {
  int from, step, count, per_row, first;
  DEVICE int token(int i) const { return i / per_row; }
  DEVICE int column(int i) const { return 4 * (first + i % per_row); }
};

// As `expect_published`: hints the residual and this rank's own shared columns into L2. Where C is not a multiple of 64
// some lines go without.
DEVICE void expect_finished(const Arguments& a, const Units& units) {
  if (threadIdx.x % 16) return;  // a thread a line
  for (int i = units.from; i < units.count; i += units.step) {
    const int column = a.rank * C + units.column(i);
    if (a.residual) prefetch_l2(a.residual + 2 * (units.token(i) * a.residual_stride + column));
    prefetch_l2(a.shared_rows + 2 * (units.token(i) * a.shared_stride + column));
  }
}

DEVICE float4 load_partial(const float* p) {
  const uint4 v = load_l2(p, uint4());
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// What four columns need beside the slices' products.
struct Rest {
  static constexpr int COUNT = W < AT_ONCE ? W : AT_ONCE;  // ranks at once
  uint2 shared[COUNT];
  float residual[4] = {}, bias[4] = {};
};

DEVICE Slots shared_slots(const Arguments& a, int region, int token, int column) {
  return {a.own_shared + region * a.region_bytes + 2 * ((u64)token * W * C + column), 2 * C,
          a.shared_rows + 2 * (token * a.shared_stride + a.rank * C + column), a.rank};
}

DEVICE void ask_rest(Rest& rest, const Arguments& a, int region, int token, int column) {
  ask<0>(rest.shared, shared_slots(a, region, token, column));
  if (a.residual)
    unpack(rest.residual, load_l2(a.residual + 2 * (token * a.residual_stride + a.rank * C + column), uint2()));
  if (a.bias) {
    if (a.flags & BIAS_FP32) {
      const float4 b = load_partial((const float*)a.bias + column);
      rest.bias[0] = b.x; rest.bias[1] = b.y; rest.bias[2] = b.z; rest.bias[3] = b.w;
    } else {
      unpack(rest.bias, load_l2(a.bias + 2 * column, uint2()));
    }
  }
}

// Four columns of which the products and squares are summed: r, scale, bias, shared, residual; one rounding; to every
// rank.
DEVICE void close_unit(const Arguments& a, u64 call, int region, int token, int column, Rest& rest, float (&y)[4],
                       float sum) {
  const Slots from = shared_slots(a, region, token, column);
  const Waiting w = waiting(a, call);
  float total[4];
  receive<0>(rest.shared, from, w, PHASE_SHARED, token);
  add<0>(total, rest.shared);
  add_ranks<Rest::COUNT, uint2>(total, from, w, PHASE_SHARED, token);
  const float r = a.norm ? __frsqrt_rn(sum / (float)L + a.eps) : 1.0f;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    // Each step by itself: an fma here would make the result depend on which terms there are.
    float x = y[k];
    if (a.norm) x = __fmul_rn(x, r);
    x = __fmul_rn(x, a.scale);
    if (a.bias) x = __fadd_rn(x, rest.bias[k]);
    x = __fadd_rn(x, total[k]);
    if (a.residual) x = __fadd_rn(x, rest.residual[k]);
    y[k] = x;
  }
  const uint2 out = publishable(make_uint2(pack(y[0], y[1]), pack(y[2], y[3])));
  const u64 place = 2 * ((u64)token * H + column);
  put_to_all<MAIL_OWN_OUT>(a, a.gather, a.gather_all, (call & 1) * a.gather_bytes + place, out);
  if (!MAIL_OWN_OUT) *(uint2*)(a.out + place + 2 * a.rank * C) = out;
}

// The cells of some slices, from `first` on: as many as there are registers for.
struct Cells {
  static constexpr int MOST = W < 8 ? 8 : 4, COUNT = SLICES < MOST ? SLICES : MOST;
  uint4 product[COUNT];
  u32 square[COUNT];
  DEVICE void ask(const u32* products, const u32* squares, int first) {
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
      product[s] = make_uint4(0, 0, 0, 0);
      square[s] = 0;
      if (SLICES % COUNT && first + s >= SLICES) continue;
      product[s] = load_gpu(products + (first + s) * C, uint4());
      square[s] = load_gpu(squares + (first + s) * (C / 4));
    }
  }
  DEVICE bool missing() const {
    bool some = false;
#pragma unroll
    for (int s = 0; s < COUNT; s++) some |= any_empty(product[s]) || square[s] == EMPTY;
    return some;
  }
  DEVICE void add(float (&y)[4], float& sum, int first) const {
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
      if (SLICES % COUNT && first + s >= SLICES) continue;
      y[0] += __uint_as_float(product[s].x); y[1] += __uint_as_float(product[s].y);
      y[2] += __uint_as_float(product[s].z); y[3] += __uint_as_float(product[s].w);
      sum += __uint_as_float(square[s]);
    }
  }
};

// A unit from its cells, which are empty then.
DEVICE void finish_flagged(const Arguments& a, u64 call, int region, int token, int column) {
  u32 *products = product_cells(a, token, column), *squares = square_cells(a, token, column);
  Waiting w = waiting(a, call);
  w.deadline_ns *= 2;  // the CTAs that it waits for wait for data, with one
  Rest rest;
  Cells cells;
  float y[4] = {-0.0f, -0.0f, -0.0f, -0.0f}, sum = -0.0f;  // to which anything can be added: it stays what it is
  constexpr bool TOGETHER = W < 8;  // or there are too few registers for two CTAs an SM
  cells.ask(products, squares, 0);
  if (TOGETHER) ask_rest(rest, a, region, token, column);
#pragma unroll 1
  for (int first = 0; first < SLICES; first += Cells::COUNT) {
    if (first) cells.ask(products, squares, first);
    Patience patience;
    while (cells.missing()) {
      patience.lose(w, PHASE_PARTIALS, token, w.rank);
      cells.ask(products, squares, first);
    }
    cells.add(y, sum, first);
  }
  if (!TOGETHER) ask_rest(rest, a, region, token, column);
  close_unit(a, call, region, token, column, rest, y, sum);
#pragma unroll 2
  for (int s = 0; s < SLICES; s++) {
    store_gpu(products + s * C, empty(uint4()));
    store_gpu(squares + s * (C / 4), EMPTY);
  }
}

// A unit from partial products and squares that are there, the slices in order. What the first eight slices and ranks have
// is asked for before anything is waited for.
DEVICE void finish_unit(const Arguments& a, u64 call, int region, int token, int column) {
  constexpr int EARLY = SLICES < 8 ? SLICES : 8;
  const float* partials = a.partials + (u64)token * SLICES * C + column;
  const float* squares = a.squares + (column / (16 * GROUP_TILES) * MAX_ROWS + token) * SLICES;
  float4 v[EARLY];
  float square[EARLY];
  Rest rest;
#pragma unroll
  for (int s = 0; s < EARLY; s++) v[s] = load_partial(partials + (u64)s * C);
  if constexpr (SLICES % 4 == 0) {
#pragma unroll
    for (int s = 0; s < EARLY; s += 4) {
      const float4 four = load_partial(squares + s);
      square[s] = four.x; square[s + 1] = four.y; square[s + 2] = four.z; square[s + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int s = 0; s < EARLY; s++) square[s] = __uint_as_float(load_l2(squares + s, u32()));
  }
  ask_rest(rest, a, region, token, column);
  float y[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
  float sum = square[0];
#pragma unroll
  for (int s = 1; s < EARLY; s++) {
    y[0] += v[s].x; y[1] += v[s].y; y[2] += v[s].z; y[3] += v[s].w;
    sum += square[s];
  }
#pragma unroll 8
  for (int s = EARLY; s < SLICES; s++) {
    const float4 more = load_partial(partials + (u64)s * C);
    sum += __uint_as_float(load_l2(squares + s, u32()));
    y[0] += more.x; y[1] += more.y; y[2] += more.z; y[3] += more.w;
  }
  close_unit(a, call, region, token, column, rest, y, sum);
}

// The same four columns of the other ranks, from the one numbered FIRST on: poll, copy out, empty. The one reader empties
// what it has read.
template <int FIRST>
DEVICE void gather_ranks(const Arguments& a, const Waiting& w, int token, int column) {
  constexpr int COUNT = GATHERED - FIRST < AT_ONCE ? GATHERED - FIRST : AT_ONCE;
  const u64 start = 2 * ((u64)token * H + column);
  const Peers from{a.own_gather + (w.call & 1) * a.gather_bytes + start, 2 * C, MAIL_OWN_OUT ? W : a.rank};
  uint2 v[COUNT];
  ask<FIRST>(v, from);
  receive<FIRST>(v, from, w, PHASE_GATHER, token);
#pragma unroll
  for (int i = FIRST; i < FIRST + COUNT; i++) {
    *(uint2*)(a.out + start + 2 * from.rank_of(i) * C) = v[i - FIRST];
    store_own(from.of(i), empty(uint2()));
  }
  if constexpr (FIRST + COUNT < GATHERED) gather_ranks<FIRST + COUNT>(a, w, token, column);
}

// Everything is published before anything is gathered.
DEVICE void finish(const Arguments& a, u64 call, const Units& units) {
  const int region = (int)(call % 3);
  for (int i = units.from; i < units.count; i += units.step) {
    if (FLAGGED) finish_flagged(a, call, region, units.token(i), units.column(i));
    else finish_unit(a, call, region, units.token(i), units.column(i));
  }
  const Waiting w = waiting(a, call);
  for (int i = units.from; i < units.count; i += units.step)
    gather_ranks<0>(a, w, units.token(i), units.column(i));
}
