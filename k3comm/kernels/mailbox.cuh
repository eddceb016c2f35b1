// The device's side of a mailbox: data is its own flag (buffers/mailbox.py says why that is right).
//
// An empty word is EMPTY; whoever reads another one has the data. A payload word with exactly those bits, two NaNs, is
// published as REPLACEMENT. All comparisons are of integers: a float comparison that flushes subnormals would hang on
// some of them. Every wait is bounded: on expiry one thread of the rank writes a record to pinned memory and the
// context is given up by a trap.
#pragma once
#include "words.cuh"

constexpr u32 EMPTY = 0xFFFFFFFFu;
constexpr u32 REPLACEMENT = 0x7FFF7FFFu;
constexpr int MAX_CELLS = 256;
constexpr u64 COMPLETIONS = 1 << 20;  // more than CTAs of any grid; in 64 bits it lasts for 2^44 calls

// What a lane keeps in its counters (device memory of its own rank, zeros at the start). `tail_fusion.py` has its size.
struct Counters {
  u64 cells[MAX_CELLS];    // calls that each CTA has begun: its own cell, never one that all read
  u32 arrived[MAX_CELLS];  // CTAs of a row group whose partial products are there, round after round (one-kernel form)
  u64 completed;           // COMPLETIONS for each call that is done whole: all clears and re-arms of all CTAs
  u64 credited;            // calls whose credits are in (below): one more than the number of the last one
  u32 rows[2];             // of the last two calls, by parity of the call number, what the next call clears: rows, times
                           // 2, and 1 more if this rank's own latent was among them
  u32 claimed;             // a thread writes the record
  u32 spare[25];
  u64 credits[16];         // written by the peers, on lines of their own: calls that each of them is done with
};

// What a wait that expired leaves behind, in pinned memory. The first word is written last.
struct Record {
  u32 written, operation, layer, call_low, call_high, phase, token, peer, rank;
};

enum Operation : u32 { MOE_TAIL = 1 };
enum Phase : u32 { PHASE_COMPLETION = 1, PHASE_LATENT = 2, PHASE_SHARED = 3, PHASE_PARTIALS = 4, PHASE_GATHER = 5,
                   PHASE_CREDIT = 6 };

DEVICE bool any_empty(uint4 v) { return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY; }
DEVICE bool any_empty(uint2 v) { return v.x == EMPTY || v.y == EMPTY; }
DEVICE u32 publishable(u32 w) { return w == EMPTY ? REPLACEMENT : w; }
DEVICE uint4 publishable(uint4 v) {
  return make_uint4(publishable(v.x), publishable(v.y), publishable(v.z), publishable(v.w));
}
// The same for the bits of a float, which are a NaN then.
DEVICE u32 publishable(float v) { return v != v ? 0x7FFFFFFFu : __float_as_uint(v); }
DEVICE uint2 publishable(uint2 v) { return make_uint2(publishable(v.x), publishable(v.y)); }
DEVICE uint4 empty(uint4) { return make_uint4(EMPTY, EMPTY, EMPTY, EMPTY); }
DEVICE uint2 empty(uint2) { return make_uint2(EMPTY, EMPTY); }

// Who waits for what: enough for the record.
struct Waiting {
  Counters* counters;
  Record* record;
  u64 deadline_ns, call;
  u32 operation, layer, rank;
};

// Writes the record, once a rank, and traps. A thread that comes second leaves the first one time to finish. By value
// and out of line: the loops that wait keep their registers, and nothing goes through a stack.
static __device__ __noinline__ void expire(Counters* counters, volatile Record* r, u64 call, u32 operation, u32 layer,
                                           u32 rank, u32 phase, u32 token, u32 peer) {
  if (atomicCAS(&counters->claimed, 0u, 1u) == 0u) {
    r->operation = operation;
    r->layer = layer;
    r->call_low = (u32)call;
    r->call_high = (u32)(call >> 32);
    r->phase = phase;
    r->token = token;
    r->peer = peer;
    r->rank = rank;
    __threadfence_system();
    r->written = 1;
    __threadfence_system();
  } else {
    for (int i = 0; i < 1000; i++) __nanosleep(1000);
  }
  __trap();
}

// Counts looks in vain. The clock is read every 64 looks; once it is past the deadline there are 64 looks more, since
// this process may have been stopped between its look and the clock (ranks that share a GPU are time-sliced).
struct Patience {
  u64 limit = 0;
  u32 looks = 0;
  bool late = false;
  DEVICE void lose(const Waiting& w, u32 phase, u32 token, u32 peer) {
    if (++looks & 63u) return;
    const u64 now = nanoseconds();
    if (limit == 0) limit = now + w.deadline_ns;
    else if (now > limit) {
      if (late) expire(w.counters, w.record, w.call, w.operation, w.layer, w.rank, phase, token, peer);
      late = true;
    }
  }
};

// Where the fragments of one place are, one a rank: in this rank's mailbox `stride` bytes apart, but its own, which is
// read where it is and never waited for. `rank` is one that does not exist where that goes through the mailbox too.
struct Slots {
  const char* mailbox;
  i64 stride;
  const char* own;
  int rank;
  DEVICE int rank_of(int i) const { return i; }
  DEVICE const char* of(int i) const { return i == rank ? own : mailbox + i * stride; }
  template <typename T> DEVICE bool missing(int i, T v) const { return i != rank && any_empty(v); }
};
// The same without this rank's own.
struct Peers {
  char* mailbox;
  i64 stride;
  int rank;
  DEVICE int rank_of(int i) const { return i < rank ? i : i + 1; }
  DEVICE char* of(int i) const { return mailbox + rank_of(i) * stride; }
  template <typename T> DEVICE bool missing(int, T v) const { return any_empty(v); }
};

// The fragments FIRST .. FIRST + COUNT - 1 of Slots or Peers, as uint4 or uint2: `ask` looks once, `receive` again where a
// word was empty.
template <int FIRST, typename T, int COUNT, typename From>
DEVICE void ask(T (&v)[COUNT], const From& from) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) v[i] = load_sys(from.of(FIRST + i), T());
}
template <int FIRST, typename T, int COUNT, typename From>
DEVICE void receive(T (&v)[COUNT], const From& from, const Waiting& w, u32 phase, u32 token) {
  Patience patience;
  while (true) {
    int missing = -1;
#pragma unroll
    for (int i = COUNT - 1; i >= 0; i--)
      if (from.missing(FIRST + i, v[i])) missing = FIRST + i;
    if (missing < 0) return;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (from.missing(FIRST + i, v[i])) v[i] = load_sys(from.of(FIRST + i), T());
    patience.lose(w, phase, token, from.rank_of(missing));
  }
}

// Two waits for calls of this rank, so that nothing here depends on what kernels the caller puts between ours (one that
// triggers early and never waits breaks "completion of the previous kernel"). By one thread; a barrier passes it on.
//
// Before anything of ours is published or polled: the credits of the call before are in. They come while that call is
// under way, so this is asked before the wait for the predecessor, and costs nothing. Thrice the deadline: it begins
// early, and whoever waits for data says better what is missing. `seen` is what an acquiring look has found.
DEVICE void wait_credited(Waiting w, u64 seen) {
  w.deadline_ns *= 3;
  Patience patience;
  while (seen < w.call) {
    patience.lose(w, PHASE_COMPLETION, 0, w.rank);
    seen = acquire(&w.counters->credited);
  }
}
// Before anything is emptied, or written where the call before reads: every call before `w.call` is done whole.
DEVICE void wait_completed(const Waiting& w) {
  Patience patience;
  // Not "equal": a CTA of this call that waits for nothing may have added its share by now.
  while (acquire(&w.counters->completed) < w.call * COMPLETIONS) patience.lose(w, PHASE_COMPLETION, 0, w.rank);
}

// Credits: what the calls before this one emptied on each rank is there before any peer writes there again.
//
// A word that is emptied in call n - 1 or before is written by a peer in call n + 1 at the earliest (three regions, two
// for the gather). Here, in call n, one CTA a rank waits until all earlier calls are done whole, says so to every peer
// with release, and waits, with acquire, until every peer has said so; then it says so to call n + 1 of its own rank,
// which publishes after that. So in PTX's terms every emptying happens before the peer's next write, and no fence stands
// before a publication: this runs beside the exchange, where nobody waits for it. What a rank empties itself happens
// before its own next polls in the same way. By a warp.
//
// Twice the deadline: who waits for data itself says better what is missing.
template <int W>
DEVICE void exchange_credits(Waiting w, u64* const (&to)[16]) {
  w.deadline_ns *= 2;
  const u32 peer = threadIdx.x & 31;
  if (peer == 0) wait_completed(w);
  __syncwarp();
  if (peer < W && peer != w.rank) {
#if K3_MULTICAST
    fence_alias();
#endif
    release_sys(to[peer], w.call);
    Patience patience;
    while (acquire_sys(&w.counters->credits[peer]) < w.call) patience.lose(w, PHASE_CREDIT, 0, peer);
  }
  __syncwarp();
  if (peer == 0) store_release(&w.counters->credited, w.call + 1);
}
