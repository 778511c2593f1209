// Random calls of attention by every instruction set of this CPU and build, for builds with a sanitizer and for CPUs that
// only an emulator has. Prints each instruction set with a hash of its results, or what is wrong with a call.

#include "../../plugins/cpu/attention/attention.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr int kCalls = 60;  // with which all code for numbers of rows and columns is used
constexpr int64_t kLengths[] = {0, 1, 15, 16, 60, 241, 255, 256, 257, 500};
constexpr int64_t kNodes[] = {1, 2, 3, 7, 11, 23};

std::mt19937 generator;

int64_t below(int64_t count) { return static_cast<int64_t>(generator() % static_cast<uint32_t>(count)); }

template <size_t kCount>
int64_t any(const int64_t (&values)[kCount]) {
  return values[below(kCount)];
}

// Numbers between -2 and 2 that are the same with every compiler and library.
std::vector<float> random_values(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (auto &each : values) each = static_cast<float>(static_cast<int32_t>(generator())) * 0x1p-30f;
  return values;
}

// The bytes of a cache of so many numbers, between -2 and 2 in fp16 too, where some are subnormal.
std::vector<float> random_cache(int64_t count, bool half) {
  std::vector<float> values = random_values(half ? count / 2 : count);
  for (auto &each : values) {
    const uint32_t two = generator() & 0xbfffbfff;
    if (half) memcpy(&each, &two, sizeof each);
  }
  return values;
}

void add(const std::vector<float> &values, uint64_t &hash) {
  for (float value : values) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    hash = (hash ^ bits) * 1099511628211u;  // FNV-1a, by words
  }
}

// Computes the call of a number, and adds its results to a hash. Arrays have no number more than the call needs.
const char *attend(int number, uint64_t &hash) {
  generator.seed(static_cast<uint32_t>(number));
  redraft_attention_call c = {};
  c.head_dim = 16 * (1 + number % 16);
  c.kv_heads = 1 + below(3);
  c.q_heads = c.kv_heads * (1 + below(6));
  c.sequences = 1 + below(2);
  c.nodes = any(kNodes);
  if (below(3) == 0) c.window = 1 + below(300);
  if (below(3) == 0) c.chunk = 1 + below(300);
  c.scale = 1 / sqrtf(static_cast<float>(c.head_dim));
  c.softcap = below(3) == 0 ? 2.0f : 0.0f;
  const bool packed = below(2), sinks = below(2), rotated = below(3) > 0;
  c.interleaved = below(2);
  c.half = below(2);

  std::vector<uint8_t> mask(static_cast<size_t>(c.sequences * c.nodes * c.nodes));
  std::vector<int64_t> positions, cache_len, places;
  for (int64_t sequence = 0; sequence < c.sequences; ++sequence) {
    const int64_t count = packed ? 1 + below(c.nodes) : c.nodes;
    const bool chain = below(3) == 0;
    cache_len.push_back(any(kLengths));
    for (int64_t place = 0; place < count; ++place) {
      const int64_t parent = chain || below(2) ? place - 1 : below(place + 1) - 1;
      uint8_t *own = mask.data() + (sequence * c.nodes + place) * c.nodes;
      if (parent >= 0) std::copy_n(own + (parent - place) * c.nodes, c.nodes, own);
      positions.push_back(cache_len.back() + std::count(own, own + c.nodes, 1));
      places.push_back(sequence * c.nodes + place);
      own[place] = 1;
    }
  }
  c.rows = static_cast<int64_t>(positions.size());
  c.capacity = c.table_rows = *std::max_element(cache_len.begin(), cache_len.end()) + c.nodes;
  c.tree_mask = mask.data();
  c.positions = positions.data();
  c.cache_len = cache_len.data();
  c.packed_rows = packed ? places.data() : nullptr;

  const int64_t width = (c.q_heads + 2 * c.kv_heads) * c.head_dim;
  const auto rows = random_values(c.rows * width), of_heads = random_values(c.q_heads);
  const auto cosines = random_values(c.table_rows * c.head_dim / 2),
             sines = random_values(c.table_rows * c.head_dim / 2);
  const int64_t cached = c.sequences * c.kv_heads * c.capacity * c.head_dim;
  auto keys = random_cache(cached, c.half), values = random_cache(cached, c.half);
  std::vector<float> out(static_cast<size_t>(c.rows * c.q_heads * c.head_dim));
  c.q = rows.data();
  c.k = c.q + c.q_heads * c.head_dim;
  c.v = c.k + c.kv_heads * c.head_dim;
  c.q_stride = c.k_stride = c.v_stride = width;
  c.sinks = sinks ? of_heads.data() : nullptr;
  c.cosines = rotated ? cosines.data() : nullptr;
  c.sines = rotated ? sines.data() : nullptr;
  c.key_cache = keys.data();
  c.value_cache = values.data();
  c.out = out.data();

  const char *wrong = nullptr;
  std::thread([&] { wrong = redraft_attention(&c); }).join();  // a new one: its plan has no memory of other calls
  for (const auto *each : {&out, &keys, &values}) add(*each, hash);
  return wrong;
}

}  // namespace

int main() {
  for (const char *isa : {"avx512", "avx2", "neon", "scalar"}) {
    if (redraft_attention_use(isa) != 0) continue;
    uint64_t hash = 14695981039346656037u;
    for (int number = 0; number < kCalls; ++number) {
      const char *wrong = attend(number, hash);
      if (wrong == nullptr) continue;
      printf("%s, call %d: %s\n", isa, number, wrong);
      return 1;
    }
    printf("%s %016llx\n", isa, static_cast<unsigned long long>(hash));
  }
}
