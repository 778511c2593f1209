#include "cuda_on_cpu.h"

#include <limits.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

namespace cuda_on_cpu {

thread_local Position here;

namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr int kWarp = 32;
constexpr size_t kGrantedBytes = 48 * 1024;
// Bits kept below the last place of the largest term: none, like the first tensor cores (Fasi et al. 2021). Later
// ones keep some.
constexpr int kBitsMore = 0;

struct Copy {
  void *target;
  const void *source;
  bool valid;
};

// The unit of shared memory, with a device's alignment.
struct alignas(16) Chunk {
  unsigned char bytes[16];
};

// A barrier: threads that `arrived` in this round, and the number of finished rounds.
struct Meeting {
  int arrived = 0;
  unsigned rounds = 0;
};

struct Warp {
  Meeting meeting;
  Lanes lanes[2];
};

struct Fiber {
  Position position;
  bool done = false;
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  std::deque<std::vector<Copy>> groups;  // committed copies, oldest first
  std::vector<Copy> open;
};

// A running block. A switch is a longjmp; only the first entry into a fiber needs a full context.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Chunk> shared;
  size_t shared_bytes = 0;
  Meeting barrier;
  const std::function<void()> *kernel = nullptr;
  Fiber *running = nullptr;
  jmp_buf scheduler;
  bool progressed = false;
};

thread_local Block block;
thread_local unsigned chosen_order = 0;
thread_local Sums chosen_sums = Sums::kNearest;

std::mutex allowances_lock;
std::map<const void *, size_t> allowances;

void enter() {
  (*block.kernel)();
  block.running->done = true;
  block.progressed = true;
  _longjmp(block.scheduler, 1);
}

void yield() {
  if (_setjmp(block.running->resume) == 0) _longjmp(block.scheduler, 1);
}

// Waits until `expected` threads have arrived. The last one continues at once.
void meet(Meeting &meeting, int expected) {
  block.progressed = true;
  if (++meeting.arrived == expected) {
    meeting.arrived = 0;
    ++meeting.rounds;
    return;
  }
  const unsigned round = meeting.rounds;
  while (meeting.rounds == round) yield();
  block.progressed = true;
}

void start(Fiber &fiber) {
  ucontext_t context;
  getcontext(&context);
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

// Runs a fiber until it yields or ends.
void turn(Fiber &fiber, bool first) {
  block.running = &fiber;
  here = fiber.position;
  if (_setjmp(block.scheduler) != 0) return;
  if (first) start(fiber);
  _longjmp(fiber.resume, 1);
}

void land(const Copy &copy) {
  if (copy.valid) {
    memcpy(copy.target, copy.source, 16);
  } else {
    memset(copy.target, 0, 16);
  }
}

std::vector<int> in_order(int count, std::mt19937 &random) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (chosen_order == 1) std::reverse(order.begin(), order.end());
  if (chosen_order > 1) std::shuffle(order.begin(), order.end(), random);
  return order;
}

void run_block(const Position &position, size_t shared_bytes, std::mt19937 &random) {
  Chunk poison;
  memset(&poison, 0xff, sizeof poison);
  block.shared.assign((shared_bytes + sizeof(Chunk) - 1) / sizeof(Chunk), poison);
  block.shared_bytes = shared_bytes;
  block.barrier = Meeting{};
  block.warps.assign((position.threads + kWarp - 1) / kWarp, Warp{});
  if (block.fibers.size() < static_cast<size_t>(position.threads)) block.fibers.resize(position.threads);
  for (int thread = 0; thread < position.threads; ++thread) {
    Fiber &fiber = block.fibers[thread];
    fiber.position = position;
    fiber.position.thread = thread;
    fiber.done = false;
    fiber.groups.clear();
    fiber.open.clear();
  }
  bool first = true;
  for (int left = position.threads; left > 0; first = false) {
    block.progressed = false;
    const unsigned resting = chosen_order > 1 && !first ? random() : 0;  // one bit for each warp
    for (const int thread : in_order(position.threads, random)) {
      Fiber &fiber = block.fibers[thread];
      if (fiber.done) continue;
      if (resting >> thread / kWarp & 1) {
        block.progressed = true;
        continue;
      }
      turn(fiber, first);
      left -= fiber.done;
    }
    if (!block.progressed) {
      fprintf(stderr, "cuda_on_cpu: %d threads of block %d wait for a thread that does not come\n", left,
              position.block);
      abort();
    }
  }
}

}  // namespace

void launch(int blocks_x, int blocks_y, int threads, size_t shared_bytes, const std::function<void()> &kernel) {
  std::mt19937 random(chosen_order);
  block.kernel = &kernel;
  for (const int index : in_order(blocks_x * blocks_y, random)) {
    run_block(Position{0, index % blocks_x, index / blocks_x, blocks_x, blocks_y, threads}, shared_bytes, random);
  }
}

void set_order(unsigned order) { chosen_order = order; }

void set_sums(Sums sums) { chosen_sums = sums; }

Sums sums() { return chosen_sums; }

float truncated_sum(const double *terms, int count) {
  int top = INT_MIN;
  double plain = 0;
  for (int i = 0; i < count; ++i) {
    plain += terms[i];
    int exponent = INT_MIN;
    if (terms[i] != 0) frexp(terms[i], &exponent);
    top = std::max(top, exponent);
  }
  if (top == INT_MIN || !isfinite(plain)) return static_cast<float>(plain);
  const int last = top - 24 - kBitsMore;
  double total = 0;  // exact: at most 24 + 3 bits
  for (int i = 0; i < count; ++i) total += ldexp(trunc(ldexp(terms[i], -last)), last);
  if (total == 0) return 0.f;
  int exponent;
  frexp(total, &exponent);
  return static_cast<float>(ldexp(trunc(ldexp(total, 24 - exponent)), exponent - 24));
}

void allow_shared_memory(const void *kernel, size_t bytes) {
  const std::lock_guard<std::mutex> guard(allowances_lock);
  allowances[kernel] = bytes;
}

const char *refusal(const void *kernel, int64_t blocks_x, int64_t blocks_y, int threads, size_t shared_bytes) {
  if (blocks_x < 1 || blocks_x > INT32_MAX || blocks_y < 1 || blocks_y > 65535) return "the grid is out of bounds";
  if (threads < 1 || threads > 1024) return "a block has more than 1024 threads, or none";
  if (shared_bytes <= kGrantedBytes) return nullptr;
  const std::lock_guard<std::mutex> guard(allowances_lock);
  const auto found = allowances.find(kernel);
  if (found != allowances.end() && shared_bytes <= found->second) return nullptr;
  return "more shared memory than 48 KiB, and none was allowed";
}

unsigned char *shared_memory() { return reinterpret_cast<unsigned char *>(block.shared.data()); }

void check_shared(const char *what, const void *address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto start = reinterpret_cast<uintptr_t>(block.shared.data());
  if (at % 16 != 0) {
    fprintf(stderr, "cuda_on_cpu: %s: expected an address at a multiple of 16 bytes, found %p\n", what, address);
    abort();
  }
  if (at < start || at + 16 > start + block.shared_bytes) {
    fprintf(stderr, "cuda_on_cpu: %s: expected 16 of the block's %zu bytes of shared memory, found offset %td\n", what,
            block.shared_bytes, static_cast<ptrdiff_t>(at - start));
    abort();
  }
}

void sync_block() { meet(block.barrier, here.threads); }

const Lanes &exchange(const void *given, size_t size) {
  Warp &warp = block.warps[here.thread / kWarp];
  Lanes &lanes = warp.lanes[warp.meeting.rounds % 2];
  memcpy(lanes.bytes[here.thread % kWarp], given, size);
  meet(warp.meeting, kWarp);
  return lanes;
}

void copy_async(void *target, const void *source, bool valid) {
  check_shared("cp.async's target", target);
  if (reinterpret_cast<uintptr_t>(source) % 16 != 0) {
    fprintf(stderr, "cuda_on_cpu: cp.async's source: expected an address at a multiple of 16 bytes, found %p\n",
            source);
    abort();
  }
  const Copy copy{target, source, valid};
  if (chosen_order % 2 == 1) {
    land(copy);
  } else {
    block.running->open.push_back(copy);
  }
}

void commit_copies() {
  block.running->groups.push_back(std::move(block.running->open));
  block.running->open.clear();
}

void wait_copies(int pending) {
  std::deque<std::vector<Copy>> &groups = block.running->groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    for (const Copy &copy : groups.front()) land(copy);
    groups.pop_front();
  }
}

float bfloat16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

uint16_t float_to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  const float sign = bits >> 15 ? -1.f : 1.f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * ldexpf(static_cast<float>(fraction), -24);
  return sign * ldexpf(static_cast<float>(fraction + 1024), exponent - 25);
}

uint16_t float_to_half(float value) {
  const uint16_t sign = signbit(value) ? 0x8000 : 0;
  const float size = fabsf(value);
  if (value != value) return sign | 0x7fff;
  if (size >= 65520.f) return sign | 0x7c00;
  int exponent = -13;                            // of the smallest normal number and all smaller ones
  if (size > 0x1p-14f) frexpf(size, &exponent);  // size = f 2^exponent with f in [0.5, 1)
  const int unit = exponent - 11;                // the exponent of the last kept bit
  const int steps = static_cast<int>(nearbyintf(ldexpf(size, -unit)));
  // Subnormals count from zero, normals from 1024, and a carry goes into the exponent.
  return sign | static_cast<uint16_t>(steps + (unit + 24) * 1024);
}

}  // namespace cuda_on_cpu
