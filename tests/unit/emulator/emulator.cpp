// Runs the kernels of tail_fusion.cu for some ranks at once; built and called by tail_emulator.py.
#include "hopper.cuh"
#include "mailbox.cuh"

Fiber* current;
ucontext_t scheduler;
bool trapped;
std::vector<Late> late[16];
u64 ticks;

// The declarations of shared memory in the source are replaced by these two.
template <typename T> T* fixed_shared(int offset) { return (T*)(current->block->fixed + offset); }
char* dynamic_shared() { return current->block->memory.data(); }

namespace exchange_kernel {
#define K3_ENTRY 1
#define K3_WHOLE 0
#include "tail_fusion.cpp"
#undef K3_ENTRY
}
namespace finish_kernel {
#define K3_ENTRY 2
#include "tail_fusion.cpp"
#undef K3_ENTRY
#undef K3_WHOLE
}
namespace whole_kernel {
#define K3_ENTRY 3
#define K3_WHOLE 1
#include "tail_fusion.cpp"
#undef K3_ENTRY
#undef K3_WHOLE
}
namespace norm_kernel {
#define K3_ENTRY 4
#define K3_WHOLE 0
#include "tail_fusion.cpp"
#undef K3_ENTRY
}

struct Kernel { int entry, grid, block, shared; };

static const unsigned char* starting;
static int starting_entry;

static void body() {
  const int entry = starting_entry;
  const unsigned char* a = starting;
  switch (entry) {
    case 1: exchange_kernel::tail_exchange(*(const exchange_kernel::Arguments*)a); break;
    case 2: finish_kernel::tail_finish(*(const finish_kernel::Arguments*)a); break;
    case 3: whole_kernel::tail_whole(*(const whole_kernel::Arguments*)a); break;
    case 4: norm_kernel::tail_next_norm(*(const norm_kernel::Arguments*)a); break;
  }
  current->done = true;
  Block* b = current->block;
  b->live--;
  if (b->live && b->arrived == b->live) { b->arrived = 0; b->generation++; }
  swapcontext(&current->context, &scheduler);
}

struct Grid {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Block>> blocks;
  int number;  // of the kernel in its rank's list
  bool released() const {
    return std::all_of(blocks.begin(), blocks.end(), [](auto& b) { return b->released || !b->live; });
  }
  bool ended() const {
    return std::all_of(fibers.begin(), fibers.end(), [](auto& f) { return f->done; });
  }
};
struct Running {
  std::vector<std::unique_ptr<Grid>> grids;  // the oldest first
  std::vector<char> ended;                   // by kernel
  int next = 0;                              // kernel
  int delay = 0;
};
enum Overlap { NONE, PDL, FOREIGN };
constexpr int IN_FLIGHT = 4;  // kernels of a rank
static int calls[16];         // that each rank has begun, run after run

// What is late lands now; or never.
extern "C" void land() {
  for (auto& words : late) {
    for (const Late& one : words) *one.to = one.word;
    words.clear();
  }
}
extern "C" void forget() {
  for (auto& words : late) words.clear();
}

static void start(Running& rank, int r, const Kernel& k, const unsigned char* a, Overlap overlap, int skew,
                  std::mt19937& random) {
  const bool begins = k.entry != 2 && k.entry != 4;  // a call
  if (begins) calls[r]++;
  // A kernel that is not ours, and ends without having waited, is all that the first one of a call could wait for.
  const bool waits = overlap == PDL || (overlap == FOREIGN && !begins);
  rank.grids.push_back(std::make_unique<Grid>());
  Grid& grid = *rank.grids.back();
  grid.number = rank.next;
  for (int c = 0; c < k.grid; c++) {
    grid.blocks.push_back(std::make_unique<Block>());
    Block* b = grid.blocks.back().get();
    b->threads = b->live = k.block;
    b->call = calls[r];
    if (waits && rank.next) b->awaited = &rank.ended[rank.next - 1];
    // The last CTA is late more often: it has duties that no other one waits for.
    if (skew && c == k.grid - 1 && random() % 3 == 0) b->still = random() % 2000;
    b->memory.assign(k.shared + 128, (char)0xFF);  // NaN
    b->warps.resize((k.block + 31) / 32);
    for (int t = 0; t < k.block; t++) {
      auto f = std::make_unique<Fiber>();
      f->stack = std::make_unique<char[]>(32768);
      f->block = b;
      f->rank = r;
      f->thread.x = t, f->cta.x = c, f->grid.x = k.grid;
      getcontext(&f->context);
      f->context.uc_stack.ss_sp = f->stack.get();
      f->context.uc_stack.ss_size = 32768;
      f->context.uc_link = nullptr;
      makecontext(&f->context, body, 0);
      grid.fibers.push_back(std::move(f));
    }
  }
  std::shuffle(grid.fibers.begin(), grid.fibers.end(), random);
  // The first run takes these two.
  starting_entry = k.entry;
  starting = a;
  for (auto& f : grid.fibers) {
    current = f.get();
    swapcontext(&scheduler, &current->context);
  }
  rank.next++;
}

static void sweep_over(Grid& grid, Overlap overlap, int skew, std::mt19937& random) {
  for (auto& b : grid.blocks) {
    if (b->still > 0) b->still--;
    else if (skew && random() % (16 * skew) == 0) b->still = random() % 200;
    if (!overlap) continue;
    for (Warp& w : b->warps) {  // apart by as much as the next kernel needs to come between
      if (w.still > 0) w.still--;
      else if (skew && random() % (64 * skew) == 0) w.still = random() % 500;
    }
  }
  for (auto& f : grid.fibers) {
    if (f->done || f->block->still > 0 || f->block->warps[f->thread.x / 32].still > 0) continue;
    if (f->blocked) {
      if (f->blocked(f.get())) continue;
      f->blocked = nullptr;
    }
    current = f.get();
    swapcontext(&scheduler, &current->context);
  }
}

// 0: all ended. 1: a trap. 2: nobody gets any further.
extern "C" int emulate_overlapping(int ranks, int kernels, const Kernel* what, const unsigned char* arguments, int size,
                                   unsigned seed, int skew, int silent, int overlap) {
  std::mt19937 random(seed);
  std::vector<Running> running(ranks);
  for (Running& rank : running) rank.ended.resize(kernels);
  trapped = false;
  ticks = 0;
  for (u64 sweep = 0; sweep < 4000000; sweep++) {
    bool all_ended = true;
    std::vector<int> order(ranks);
    for (int r = 0; r < ranks; r++) order[r] = r;
    std::shuffle(order.begin(), order.end(), random);
    for (int r : order) {
      Running& rank = running[r];
      auto& grids = rank.grids;
      const bool more = rank.next < kernels && !(r == silent && rank.next == kernels - 1);
      if (!more && grids.empty()) continue;
      all_ended = false;
      const bool let = grids.empty() || (overlap && grids.size() < IN_FLIGHT && grids.back()->released());
      if (more && let && rank.delay-- <= 0) {
        const unsigned char* a = arguments + ((size_t)r * kernels + rank.next) * size;
        start(rank, r, what[rank.next], a, (Overlap)overlap, skew, random);
        rank.delay = skew ? random() % (8 * skew) : 0;
      } else if (skew && random() % skew == 0) {
        continue;  // this rank stands still for a moment
      } else {
        for (auto& grid : grids) sweep_over(*grid, (Overlap)overlap, skew, random);
      }
      if (trapped) return 1;
      for (auto& grid : grids) rank.ended[grid->number] = grid->ended();
      grids.erase(std::remove_if(grids.begin(), grids.end(), [](auto& grid) { return grid->ended(); }), grids.end());
    }
    if (all_ended) return 0;
  }
  return 2;
}
extern "C" int emulate(int ranks, int kernels, const Kernel* what, const unsigned char* arguments, int size,
                       unsigned seed, int skew, int silent) {
  return emulate_overlapping(ranks, kernels, what, arguments, size, seed, skew, silent, NONE);
}
