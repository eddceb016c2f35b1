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

struct Running {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Block>> blocks;
  int next = 0;  // kernel
  int delay = 0;
};

// What is late lands now; or never.
extern "C" void land() {
  for (auto& words : late) {
    for (auto [to, word] : words) *to = word;
    words.clear();
  }
}
extern "C" void forget() {
  for (auto& words : late) words.clear();
}

// 0: all ended. 1: a trap. 2: nobody gets any further.
extern "C" int emulate(int ranks, int kernels, const Kernel* what, const unsigned char* arguments, int size,
                       unsigned seed, int skew, int silent) {
  std::mt19937 random(seed);
  std::vector<Running> running(ranks);
  trapped = false;
  ticks = 0;
  for (u64 sweep = 0; sweep < 4000000; sweep++) {
    bool all_ended = true;
    std::vector<int> order(ranks);
    for (int r = 0; r < ranks; r++) order[r] = r;
    std::shuffle(order.begin(), order.end(), random);
    for (int r : order) {
      Running& rank = running[r];
      if (rank.fibers.empty()) {
        if (rank.next == kernels || (r == silent && rank.next == kernels - 1)) continue;
        all_ended = false;
        if (rank.delay > 0) { rank.delay--; continue; }
        const Kernel& k = what[rank.next];
        const unsigned char* a = arguments + ((size_t)r * kernels + rank.next) * size;
        for (int c = 0; c < k.grid; c++) {
          rank.blocks.push_back(std::make_unique<Block>());
          Block* b = rank.blocks.back().get();
          b->threads = b->live = k.block;
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
            // The first run takes the arguments from these two.
            f->seen = (u64)a;
            f->blocked = nullptr;
            rank.fibers.push_back(std::move(f));
          }
        }
        std::shuffle(rank.fibers.begin(), rank.fibers.end(), random);
        starting_entry = k.entry;
        starting = a;
        for (auto& f : rank.fibers) {
          current = f.get();
          swapcontext(&scheduler, &current->context);
        }
      } else {
        all_ended = false;
        if (skew && random() % skew == 0) continue;  // this rank stands still for a moment
        for (auto& b : rank.blocks) {
          if (b->still > 0) b->still--;
          else if (skew && random() % (16 * skew) == 0) b->still = random() % 200;
        }
        for (auto& f : rank.fibers) {
          if (f->done || f->block->still > 0) continue;
          if (f->blocked) {
            if (f->blocked(f.get())) continue;
            f->blocked = nullptr;
          }
          current = f.get();
          swapcontext(&scheduler, &current->context);
        }
      }
      if (trapped) return 1;
      if (!rank.fibers.empty() && std::all_of(rank.fibers.begin(), rank.fibers.end(), [](auto& f) { return f->done; })) {
        rank.fibers.clear();
        rank.blocks.clear();
        rank.next++;
        rank.delay = skew ? random() % (8 * skew) : 0;
      }
    }
    if (all_ended) return 0;
  }
  return 2;
}
