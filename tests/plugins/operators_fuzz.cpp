// Calls of the operators' C entries that bytes decode to: any sizes, extreme values, wrong arguments. On every instruction
// set of this CPU and build, products equal the definition in products.h to the bit, attention and gates plain C++. Wrong
// arguments are refused before anything is written. Arrays have no byte more than a call needs, for sanitizers.
//
// libFuzzer calls LLVMFuzzerTestOneInput. Without it, `operators_fuzz COUNT [FIRST]` draws the bytes of COUNT calls from
// the numbers FIRST, FIRST + 1, ...

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <random>
#include <vector>

#include "../../plugins/cpu/attention/attention.h"
#include "../../plugins/cpu/attention/gate.h"
#include "../../plugins/cpu/products/products.h"

namespace {

using Floats = std::vector<float>;
using Numbers = std::vector<int64_t>;

constexpr float kUnwritten = 12345.0f;
constexpr float kExtremes[] = {0.0f,           -0.0f,  HUGE_VALF, -HUGE_VALF, NAN,   -NAN,  3.4028235e38f,
                               -3.4028235e38f, 1e-45f, -1e-40f,   3e-38f,     1e30f, 127.5f};

constexpr float kSizes[] = {0.0f, 1e-43f, 1e-41f, 1e-37f, 1e-10f, 1e18f, 1e38f};

void expect(bool right, const char *what, const char *isa = "") {
  if (right) return;
  fprintf(stderr, "\n%s: %s\n", isa, what);
  abort();
}

// Numbers from bytes; 0, the usual case of every choice, after the last one.
struct Bytes {
  const uint8_t *at;
  size_t left;

  uint32_t next() {
    uint32_t value = 0;
    const size_t count = std::min(left, sizeof(uint16_t));
    memcpy(&value, at, count);
    at += count;
    left -= count;
    return value;
  }
  int64_t below(int64_t count) { return next() % count; }
  bool rarely() { return below(16) == 15; }
  int64_t any(std::initializer_list<int64_t> of) { return of.begin()[below(static_cast<int64_t>(of.size()))]; }

  // Numbers between -2 and 2, rarely tiny or huge ones, and rarely with extreme ones among them.
  Floats floats(int64_t count) {
    std::minstd_rand random(next() + 1);
    const float size = rarely() ? kSizes[below(std::size(kSizes))] : 1.0f;
    const uint32_t share = rarely() ? 1 + next() % 256 : 0;
    Floats values(static_cast<size_t>(count));
    for (float &each : values) {
      const auto bits = static_cast<uint32_t>(random());
      each = static_cast<float>(static_cast<int32_t>(bits << 1)) * 0x1p-30f * size;
      if ((bits >> 8 & 255) < share) each = kExtremes[(bits >> 16) % std::size(kExtremes)];
    }
    return values;
  }
};

bool same(const Floats &a, const Floats &b) {
  const auto equal = [](float x, float y) { return x != x ? y != y : memcmp(&x, &y, sizeof x) == 0; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), equal);
}

// The same of caches, of fp16 if `half`.
bool same_caches(const Floats &a, const Floats &b, bool half) {
  if (!half) return same(a, b);
  const auto *from = reinterpret_cast<const unsigned char *>(a.data());
  const auto *other = reinterpret_cast<const unsigned char *>(b.data());
  for (size_t at = 0; at < a.size() * sizeof(float); at += 2) {
    uint16_t x, y;
    memcpy(&x, from + at, sizeof x);
    memcpy(&y, other + at, sizeof y);
    if (x != y && ((x & 0x7fff) <= 0x7c00 || (y & 0x7fff) <= 0x7c00)) return false;
  }
  return true;
}

// ---- Products.

struct Free {
  void operator()(uint8_t *memory) const { free(memory); }
};

std::unique_ptr<uint8_t, Free> aligned(int64_t size) {
  void *memory = nullptr;
  expect(posix_memalign(&memory, 64, static_cast<size_t>(size)) == 0, "no memory");
  return std::unique_ptr<uint8_t, Free>(static_cast<uint8_t *>(memory));
}

// Returns the code or zero point of a number in a row of bytes.
int32_t code(const uint8_t *row, int64_t number, int32_t bits) {
  return bits == 8 ? row[number] : row[number / 2] >> number % 2 * 4 & 15;
}

Floats defined_product(const redraft_block_matrix &m, const Floats &x, const float *bias) {
  const int64_t blocks = (m.k + m.block - 1) / m.block, rows = static_cast<int64_t>(x.size()) / m.k;
  Floats y(static_cast<size_t>(rows * m.n));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const float *from = x.data() + row * m.k + block * m.block;
      const int64_t count = std::min<int64_t>(m.block, m.k - block * m.block);
      float most = 0;  // stays NaN, since a comparison with it is false
      for (int64_t i = 0; i < count; ++i) most = isfinite(from[i]) ? std::max(most, fabsf(from[i])) : NAN;
      const float scale = most / 127;
      std::vector<int32_t> q(static_cast<size_t>(count));
      for (int64_t i = 0; i < count && scale > 0; ++i) {
        q[i] = static_cast<int32_t>(nearbyintf(std::clamp(from[i] / scale, -127.0f, 127.0f)));
      }
      for (int64_t column = 0; column < m.n; ++column) {
        const int64_t number = column * blocks + block, zero_row = column * ((blocks * m.bits + 7) / 8);
        const int32_t zero = m.zero_points ? code(m.zero_points + zero_row, block, m.bits) : 1 << (m.bits - 1);
        int32_t sum = 0;
        for (int64_t i = 0; i < count; ++i) sum += q[i] * (code(m.codes, number * m.block + i, m.bits) - zero);
        float &to = y[row * m.n + column];
        to = fmaf(scale * m.scales[number], static_cast<float>(sum), to);
      }
    }
    for (int64_t column = 0; bias && column < m.n; ++column) y[row * m.n + column] += bias[column];
  }
  return y;
}

// Makes one field wrong. Its arrays are null, since nothing may be read.
void refuse_matrix(Bytes &bytes, redraft_block_matrix m) {
  switch (bytes.below(4)) {
    case 0: m.bits = static_cast<int32_t>(bytes.any({0, -4, 1, 5, 16, INT32_MIN, INT32_MAX})); break;
    case 1: m.block = static_cast<int32_t>(bytes.any({0, -16, 1, 8, 24, 512, INT32_MIN, INT32_MAX})); break;
    case 2: m.n = bytes.any({0, -1, INT64_MIN, int64_t{1} << 31, INT64_MAX}); break;
    default: m.k = bytes.any({0, -1, INT64_MIN, int64_t{1} << 31, INT64_MAX}); break;
  }
  expect(redraft_products_packed_bytes(&m) == 0, "a wrong matrix has a packed form");
  expect(redraft_products_pack(&m, nullptr) == 1, "a wrong matrix is packed");
}

void fuzz_products(Bytes &bytes) {
  redraft_block_matrix m{};
  m.bits = bytes.below(2) ? 4 : 8;
  m.block = 16 << bytes.below(5);
  m.n = 1 + bytes.below(40);
  m.k = 1 + bytes.below(3 * m.block);
  if (bytes.rarely()) return refuse_matrix(bytes, m);
  const int64_t blocks = (m.k + m.block - 1) / m.block, rows = bytes.below(bytes.rarely() ? 40 : 9);
  std::minstd_rand random(bytes.next() + 1);
  const auto fill = [&](int64_t count) {
    const uint8_t all = bytes.rarely() ? 255 : 0, none = bytes.rarely() ? 0 : 255;
    std::vector<uint8_t> codes(static_cast<size_t>(count));
    for (auto &each : codes) each = static_cast<uint8_t>((random() >> 8 | all) & none);
    return codes;
  };
  const auto codes = fill(m.n * blocks * m.block * m.bits / 8);
  const auto zeros = fill(m.n * ((blocks * m.bits + 7) / 8));
  const Floats scales = bytes.floats(m.n * blocks), x = bytes.floats(rows * m.k), added = bytes.floats(m.n);
  m.codes = codes.data();
  m.scales = scales.data();
  m.zero_points = bytes.below(2) ? zeros.data() : nullptr;
  const float *bias = bytes.below(2) ? added.data() : nullptr;
  const Floats expected = defined_product(m, x, bias);
  const auto packed = aligned(redraft_products_packed_bytes(&m));
  expect(redraft_products_pack(&m, packed.get()) == 0, "a matrix is refused");
  const int64_t tiles = redraft_products_tiles(packed.get());
  const int64_t row_cut = bytes.below(rows + 1), tile_cut = bytes.below(tiles + 1);
  for (const char *isa : {"amx", "avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dot", "scalar"}) {
    if (redraft_products_use(isa) != 0) continue;
    const auto scratch = aligned(redraft_products_scratch_bytes(packed.get(), rows));
    Floats y(expected.size(), kUnwritten);
    redraft_products_quantize(packed.get(), x.data(), rows, row_cut, rows, scratch.get());
    redraft_products_quantize(packed.get(), x.data(), rows, 0, row_cut, scratch.get());
    redraft_products_multiply(packed.get(), scratch.get(), rows, bias, y.data(), tile_cut, tiles);
    redraft_products_multiply(packed.get(), scratch.get(), rows, bias, y.data(), 0, tile_cut);
    expect(same(y, expected), "a product is not the defined one", isa);
  }
}

// ---- Attention.

// A call's arrays, which `call` points to.
struct Attention {
  redraft_attention_call call{};
  Floats rows, keys, values, sinks, cosines, sines, out;
  std::vector<uint8_t> mask;
  Numbers positions, cache_len, places;
  int64_t k_at = 0, v_at = 0;

  void point() {
    auto &c = call;
    c.q = rows.data();
    c.k = c.q + k_at;
    c.v = c.q + v_at;
    c.key_cache = keys.data();
    c.value_cache = values.data();
    c.tree_mask = mask.data();
    c.positions = positions.data();
    c.cache_len = cache_len.data();
    if (c.packed_rows && c.rows > 0) c.packed_rows = places.data();
    if (c.sinks) c.sinks = sinks.data();
    if (c.cosines) c.cosines = cosines.data();
    if (c.sines) c.sines = sines.data();
    c.out = out.data();
  }
};

// Adds the nodes of a sequence: a tree, in any order that has parents first.
void add_nodes(Bytes &bytes, Attention &a, int64_t sequence, int64_t count, int64_t past) {
  const int64_t nodes = a.call.nodes;
  const bool chain = bytes.below(3) == 0;
  a.cache_len.push_back(past);
  for (int64_t place = 0; place < count; ++place) {
    const int64_t parent = chain || bytes.below(2) ? place - 1 : bytes.below(place + 1) - 1;
    uint8_t *own = a.mask.data() + (sequence * nodes + place) * nodes;
    if (parent >= 0) std::copy_n(own + (parent - place) * nodes, nodes, own);
    a.positions.push_back(past + std::count(own, own + nodes, 1));
    a.places.push_back(sequence * nodes + place);
    own[place] = 1;
  }
}

Attention any_call(Bytes &bytes) {
  Attention a;
  auto &c = a.call;
  const int64_t large = bytes.rarely() ? bytes.below(3) : -1;  // which one of the sizes is
  c.head_dim = 16 * (1 + bytes.below(large == 0 ? 16 : 5));
  c.kv_heads = 1 + bytes.below(3);
  c.q_heads = c.kv_heads * (1 + bytes.below(large == 1 ? 48 : 5));
  c.sequences = bytes.rarely() ? 0 : 1 + bytes.below(3);
  c.nodes = 1 + bytes.below(large == 2 ? 60 : 12);
  if (bytes.below(3) == 1) c.window = 1 + bytes.below(300);
  if (bytes.below(3) == 1) c.chunk = 1 + bytes.below(300);
  c.scale = 1 / sqrtf(static_cast<float>(c.head_dim));
  c.softcap = bytes.below(3) == 1 ? 2.0f : 0.0f;
  c.interleaved = bytes.below(2);
  c.half = bytes.below(2);  // its caches are the first half of those for fp32
  const bool packed = bytes.below(2);
  a.mask.resize(static_cast<size_t>(c.sequences * c.nodes * c.nodes));
  int64_t longest = 0;
  for (int64_t sequence = 0; sequence < c.sequences; ++sequence) {
    const int64_t past = bytes.below(2) ? bytes.any({0, 1, 15, 16, 255, 256, 257, 511, 512}) : bytes.below(600);
    add_nodes(bytes, a, sequence, packed ? bytes.below(c.nodes + 1) : c.nodes, past);
    longest = std::max(longest, past);
  }
  c.rows = static_cast<int64_t>(a.positions.size());
  c.capacity = c.table_rows = longest + c.nodes + bytes.below(3);
  a.k_at = c.q_heads * c.head_dim;
  a.v_at = a.k_at + c.kv_heads * c.head_dim;
  c.q_stride = c.k_stride = c.v_stride = a.v_at + c.kv_heads * c.head_dim;
  a.rows = bytes.floats(std::max<int64_t>(1, c.rows) * c.q_stride);
  a.keys = bytes.floats(c.sequences * c.kv_heads * c.capacity * c.head_dim);
  a.values = bytes.floats(static_cast<int64_t>(a.keys.size()));
  a.sinks = bytes.floats(c.q_heads);
  a.cosines = bytes.floats(c.table_rows * c.head_dim / 2);
  a.sines = bytes.floats(c.table_rows * c.head_dim / 2);
  a.out.assign(static_cast<size_t>(c.rows * c.q_heads * c.head_dim), kUnwritten);
  static constexpr int64_t kNone = 0;  // where an empty vector's data are null
  if (packed) c.packed_rows = &kNone;
  if (bytes.below(2)) c.sinks = a.sinks.data();
  if (bytes.below(2)) {
    c.cosines = a.cosines.data();
    c.sines = a.sines.data();
  }
  return a;
}

// Changes numbers of masks and positions. Such a call is refused or computed, as its numbers say.
void change_numbers(Bytes &bytes, Attention &a) {
  for (int64_t i = bytes.below(4); i >= 0 && !a.mask.empty(); --i) {
    a.mask[bytes.next() % a.mask.size()] = static_cast<uint8_t>(bytes.next());
  }
  const int64_t extreme = bytes.any({-1, 0, 1, 255, 256, 5000, INT64_MAX, INT64_MIN, int64_t{1} << 62});
  if (!a.positions.empty()) a.positions[bytes.next() % a.positions.size()] = extreme;
}

// Makes an argument wrong, of which a call must be refused.
void make_wrong(Bytes &bytes, Attention &a) {
  auto &c = a.call;
  const int64_t negative = bytes.any({-1, -2, -16, INT64_MIN, INT64_MIN / 2});
  int64_t *const sizes[] = {&c.sequences, &c.nodes,  &c.rows,     &c.capacity, &c.q_heads,
                            &c.kv_heads,  &c.window, &c.head_dim, &c.chunk};
  const int64_t which = bytes.below(16), last = c.rows - 1;
  if (which < 9) {
    *sizes[which] = negative;
  } else if (which == 9) {
    c.head_dim = bytes.any({0, 1, 8, 24, 272, INT64_MAX, int64_t{1} << 62});
  } else if (which == 10) {
    c.q_heads = bytes.any({0, 49 * c.kv_heads, c.kv_heads * (int64_t{1} << 40)});
  } else if (which == 11) {
    c.cosines = c.cosines ? nullptr : a.cosines.data();
  } else if (which == 12) {  // as many places as rows only if their number is wrapped
    c.packed_rows = nullptr;
    c.sequences = bytes.any({5, int64_t{1} << 32, INT64_MAX});
    c.nodes = bytes.any({61, int64_t{1} << 32, INT64_MAX});
  } else if (c.rows == 0) {
    c.window = negative;
  } else if (which == 13) {
    a.cache_len[a.places[last] / c.nodes] = bytes.any({negative, c.capacity, INT64_MAX, int64_t{1} << 62});
  } else if (which == 14) {
    c.packed_rows = a.places.data();
    a.places[last] = bytes.any({negative, c.sequences * c.nodes, INT64_MAX, last ? a.places[last - 1] : -1});
  } else {
    c.cosines = a.cosines.data();
    c.sines = a.sines.data();
    a.positions[last] = bytes.any({negative, c.table_rows, INT64_MAX});
  }
}

const char *attend(const char *isa, Attention &a) {
  redraft_attention_use(isa);
  a.point();
  return redraft_attention(&a.call);
}

// Computes a sequence of a call alone, with results at the places of the call's.
void attend_alone(Attention &a, int64_t sequence) {
  auto c = a.call;
  const int64_t place = sequence * c.nodes, cache = sequence * c.kv_heads * c.capacity * c.head_dim;
  const int64_t bytes = c.half ? 2 : 4;
  const auto from = std::lower_bound(a.places.begin(), a.places.end(), place);
  const auto to = std::lower_bound(from, a.places.end(), place + c.nodes);
  const int64_t first = from - a.places.begin();
  Numbers places(from, to);
  for (auto &each : places) each -= place;
  c.sequences = 1;
  c.rows = to - from;
  if (c.rows == 0) return;
  c.q += first * c.q_stride;
  c.k += first * c.k_stride;
  c.v += first * c.v_stride;
  c.key_cache = static_cast<char *>(c.key_cache) + cache * bytes;
  c.value_cache = static_cast<char *>(c.value_cache) + cache * bytes;
  c.tree_mask += place * c.nodes;
  c.positions += first;
  c.cache_len += sequence;
  c.packed_rows = places.data();
  c.out += first * c.q_heads * c.head_dim;
  expect(redraft_attention(&c) == nullptr, "a sequence alone is refused");
}

void fuzz_attention(Bytes &bytes) {
  Attention given = any_call(bytes);
  const bool wrong = bytes.rarely();
  if (!wrong && bytes.rarely()) change_numbers(bytes, given);
  if (wrong) make_wrong(bytes, given);
  Attention expected = given;
  const char *refusal = attend("scalar", expected);
  expect(refusal != nullptr || !wrong, "a wrong call is computed");
  const auto as_expected = [&](const Attention &a) {
    const bool half = given.call.half;
    return same(a.out, expected.out) && same_caches(a.keys, expected.keys, half) &&
           same_caches(a.values, expected.values, half);
  };
  if (refusal != nullptr) {
    expect(wrong || given.call.rows > 0, refusal);
    expect(as_expected(given), "a refused call is written");
    return;
  }
  expect(std::count(expected.out.begin(), expected.out.end(), kUnwritten) == 0, "a result is not written");
  for (const char *isa : {"avx512", "avx2", "neon"}) {
    if (redraft_attention_use(isa) != 0) continue;
    Attention found = given;
    expect(attend(isa, found) == nullptr, "a call is refused", isa);
    expect(as_expected(found), "a result is not that of plain C++", isa);
  }
  Attention parts = given;
  parts.point();
  for (int64_t sequence = 0; sequence < given.call.sequences; ++sequence) attend_alone(parts, sequence);
  expect(as_expected(parts), "a sequence alone is not as in its batch", redraft_attention_isa());
}

// ---- Gates.

Floats gated(const char *isa, const Floats &x, const float *factors, int64_t n, int64_t first, int64_t last) {
  Floats y(x.size() / 2, kUnwritten);
  const redraft_gate_call call{n, x.data(), factors, y.data()};
  redraft_attention_use(isa);
  redraft_gate(&call, first, last);
  return y;
}

void fuzz_gate(Bytes &bytes) {
  const int64_t n = bytes.below(bytes.rarely() ? 600 : 40), rows = 1 + bytes.below(4);
  const Floats x = bytes.floats(rows * 2 * n), given = bytes.floats(n);
  const float *factors = bytes.below(2) ? given.data() : nullptr;
  const int64_t first = bytes.below(rows + 1), last = first + bytes.below(rows - first + 1);
  const Floats expected = gated("scalar", x, factors, n, first, last);
  const auto from = expected.begin() + first * n, to = expected.begin() + last * n;
  expect(std::count(from, to, kUnwritten) == 0, "a gate is not written");
  expect(std::count(expected.begin(), from, kUnwritten) == first * n, "a row before those of a call is written");
  expect(std::count(to, expected.end(), kUnwritten) == (rows - last) * n, "a row after those of a call is written");
  for (const char *isa : {"avx512", "avx2", "neon"}) {
    if (redraft_attention_use(isa) != 0) continue;
    expect(same(gated(isa, x, factors, n, first, last), expected), "a gate is not that of plain C++", isa);
  }
  if (first == last || n == 0) return;
  const int64_t row = first + bytes.below(last - first), i = bytes.below(n);
  const Floats alone{x[row * 2 * n + i], x[row * 2 * n + n + i]};
  const Floats found = gated(redraft_attention_isa(), alone, factors ? factors + i : nullptr, 1, 0, 1);
  expect(same(found, {expected[row * n + i]}), "a number alone is not as in its row", redraft_attention_isa());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Bytes bytes{data, size};
  switch (bytes.below(5)) {
    case 0:
    case 1: fuzz_attention(bytes); break;
    case 2:
    case 3: fuzz_products(bytes); break;
    default: fuzz_gate(bytes); break;
  }
  return 0;
}

#ifndef REDRAFT_LIBFUZZER
int main(int count, char **arguments) {
  const auto first = count > 2 ? strtoul(arguments[2], nullptr, 10) : 0, calls = strtoul(arguments[1], nullptr, 10);
  for (auto number = first; number < first + calls; ++number) {
    fprintf(stderr, "\rcall %lu", number);  // the last words before a sanitizer's
    std::mt19937 random(static_cast<uint32_t>(number));
    uint8_t data[256];
    for (auto &each : data) each = static_cast<uint8_t>(random());
    LLVMFuzzerTestOneInput(data, sizeof data);
  }
}
#endif
