// Small kernels, some wrong on purpose: what the CPU build must get right, and what it must catch.
//
// usage: shim_test NAME ORDER; prints numbers, or ends by abort.

#include <stdio.h>

#include <string>
#include <vector>

#include "../../plugins/tree_attention/launch.cuh"

int redraft::failed(int code, const char *, ...) { return code; }

using namespace redraft;

namespace {

constexpr int kThreads = 64;

// Every thread reads what its neighbour in the other warp wrote.
void reverse(int *out, bool with_barrier) {
  int *shared = reinterpret_cast<int *>(shared_memory());
  shared[thread_index()] = thread_index();
  if (with_barrier) sync_block();
  out[thread_index()] = shared[kThreads - 1 - thread_index()];
}

// Every thread reads what it copied itself, waited for or not.
void copy(const int *from, int *out, int pending) {
  int *shared = reinterpret_cast<int *>(shared_memory());
  copy_async(shared + 4 * thread_index(), from, true);
  commit_copies();
  copy_async(shared + 4 * (kThreads + thread_index()), from, false);
  commit_copies();
  if (pending == 0) wait_copies<0>();
  if (pending == 1) wait_copies<1>();
  out[2 * thread_index()] = shared[4 * thread_index() + 3];
  out[2 * thread_index() + 1] = shared[4 * (kThreads + thread_index()) + 3];
}

// How far a warp gets ahead of the other, in exchanges.
void drift(int *out) {
  int *rounds = reinterpret_cast<int *>(shared_memory());
  const int warp = thread_index() / kWarp;
  for (int round = 0; round < 100; ++round) {
    rounds[warp] = round;
    shuffle_xor(0.f, 1);
    if (warp == 0 && rounds[1] >= 0) out[0] = out[0] < round - rounds[1] ? round - rounds[1] : out[0];
  }
}

void uneven(int) {
  if (thread_index() > 0) sync_block();
}

// 16 bytes from `from` to `at` bytes behind the start of shared memory.
void copy_to(int at, const void *from) { copy_async(shared_memory() + at, from, true); }

void load_from(int at) {
  uint32_t words[4];
  load_matrices(words, shared_memory() + at);
}

void load_transposed_from(int at) {
  uint32_t words[4];
  load_matrices_transposed(words, shared_memory() + at);
}

void idle() {}
void idle_too() {}

// Statuses of launches that a device refuses, and of their nearest neighbours that it does not.
std::vector<int> launches() {
  constexpr int kGranted = 48 * 1024;
  std::vector<int> found;
  const auto note = [&](Grid grid, int threads, int shared_bytes) {
    found.push_back(redraft::launch(idle, grid, threads, shared_bytes, nullptr));
  };
  note(Grid{1, 1}, 32, kGranted);
  note(Grid{1, 1}, 32, kGranted + 1);
  allow_shared_memory(idle_too, 2 * kGranted);
  note(Grid{1, 1}, 32, kGranted + 1);
  allow_shared_memory(idle, 2 * kGranted);
  note(Grid{1, 1}, 32, 2 * kGranted);
  note(Grid{1, 1}, 32, 2 * kGranted + 1);
  note(Grid{1, 65535}, 1, 0);
  note(Grid{1, 65536}, 1, 0);
  note(Grid{0, 1}, 1, 0);
  note(Grid{1, 1}, 1025, 0);
  return found;
}

void print_truncated(std::vector<double> terms) {
  printf("%a\n", static_cast<double>(cuda_on_cpu::truncated_sum(terms.data(), static_cast<int>(terms.size()))));
}

void print(const std::vector<int> &values) {
  for (const int value : values) printf("%d ", value);
  printf("\n");
}

template <class Kernel>
void launch(Kernel kernel) {
  cuda_on_cpu::launch(2, 1, kThreads, 8 * kThreads * sizeof(int), kernel);
}

}  // namespace

int main(int, char **arguments) {
  const std::string name = arguments[1];
  cuda_on_cpu::set_order(static_cast<unsigned>(atoi(arguments[2])));
  std::vector<int> out(2 * kThreads, -1);
  alignas(16) const int from[5] = {3, 4, 5, 6};
  constexpr int kEnd = 8 * kThreads * static_cast<int>(sizeof(int));
  if (name == "barrier") launch([&] { reverse(out.data(), true); });
  if (name == "no barrier") launch([&] { reverse(out.data(), false); });
  if (name == "wait 0") launch([&] { copy(from, out.data(), 0); });
  if (name == "wait 1") launch([&] { copy(from, out.data(), 1); });
  if (name == "no wait") launch([&] { copy(from, out.data(), 2); });
  if (name == "copy to 8") launch([&] { copy_to(8, from); });
  if (name == "copy from 4") launch([&] { copy_to(0, from + 1); });
  if (name == "copy to the end") launch([&] { copy_to(kEnd, from); });
  if (name == "copy to before the start") launch([&] { copy_to(-16, from); });
  if (name == "load from 8") launch([&] { load_from(8); });
  if (name == "load from the end") launch([&] { load_from(kEnd); });
  if (name == "load transposed from 8") launch([&] { load_transposed_from(8); });
  if (name == "load transposed from the end") launch([&] { load_transposed_from(kEnd); });
  if (name == "last bytes") launch([&] { copy_to(kEnd - 16, from), load_from(kEnd - 16); });
  if (name == "launches") out = launches();
  if (name == "truncated") {
    const double last = ldexp(1, -23);  // place of 1
    print_truncated({1, .75 * last, .75 * last, .75 * last, .75 * last});
    print_truncated({-1, -.75 * last, -.75 * last, -.75 * last, -.75 * last});
    print_truncated({1 + last, 1 + 2 * last, 0, 0, 0});
    print_truncated({0, 3, .5, -1, ldexp(1, -100)});
    print_truncated({0, 0, 0, 0, 0});
    print_truncated({1, INFINITY, 0, 0, 0});
    return 0;
  }
  if (name == "drift") launch([&] { drift(out.data()); });
  if (name == "uneven") launch([&] { uneven(0); });
  print(out);
  return 0;
}
