// The kernels, over the vectors of one instruction set. Each file with flags of its own includes this once.
//
// Isa: Floats and Ints, vectors of kLanes numbers that the compiler's operators take; fma; kMostRows, the query rows whose
// scores of kKeys keys stay in registers; widen(from): kLanes numbers in fp16 as fp32; transpose(from, to): 8 numbers of
// each of 8 rows to columns of kKeys rows. Number is the type of the caches' numbers.

#pragma once

#include <math.h>
#include <string.h>

#include <algorithm>

#include "half.h"
#include "plan.h"

namespace {

using namespace redraft::attention;

constexpr int64_t kMostDim = 256;

template <typename Isa>
struct Attend {
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  static constexpr int kLanes = Isa::kLanes, kVectors = kKeys / kLanes;

  static Floats load(const float *from) {
    Floats value;
    memcpy(&value, from, sizeof value);
    return value;
  }
  static Floats load(const Half *from) { return Isa::widen(from); }
  static void store(float *to, Floats value) { memcpy(to, &value, sizeof value); }
  static Floats all(float value) { return value - Floats{}; }
  static Floats larger(Floats a, Floats b) { return a > b ? a : b; }

  // exp(x) for x <= 0, and about exp(-86) below -86: the polynomial of Cephes' expf (Moshier), by fma.
  static Floats exp(Floats x) {
    const Floats round = all(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the nearest integer
    x = larger(all(-86.0f), x);
    const Floats shifted = Isa::fma(x, all(1.44269504088896341f), round), n = shifted - round;
    const Floats r = Isa::fma(n, all(2.12194440e-4f), Isa::fma(n, all(-0.693359375f), x));
    Floats y = Isa::fma(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
    y = Isa::fma(y, r, all(8.3334519073e-3f));
    y = Isa::fma(y, r, all(4.1665795894e-2f));
    y = Isa::fma(y, r, all(1.6666665459e-1f));
    y = Isa::fma(y, r, all(5.0000001201e-1f));
    y = Isa::fma(y, r * r, r) + all(1.0f);
    const auto scaled = reinterpret_cast<Floats>(reinterpret_cast<Ints>(y) + (reinterpret_cast<Ints>(shifted) << 23));
    return x == x ? scaled : x;
  }

  static float exp_of(float x) { return exp(all(x))[0]; }

  // softcap * tanh(score / softcap), by (1 - e) / (1 + e) with e = exp(-2 |x|).
  static Floats capped(Floats scores, Floats cap) {
    const Floats x = scores / cap, size = x < all(0.0f) ? -x : x;
    const Floats e = exp(all(-2.0f) * size), t = (all(1.0f) - e) / (all(1.0f) + e);
    return cap * (x < all(0.0f) ? -t : t);
  }

  static float reduced(const Floats (&lanes)[kVectors], float (*join)(float, float)) {
    float of[kKeys];
    memcpy(of, lanes, sizeof of);
    for (int64_t half = kKeys / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) of[i] = join(of[i], of[i + half]);
    }
    return of[0];
  }

  // ---- The gate of a feed-forward layer.

  // Writes y[i .. i + count - 1] of a row. The loop gives a constant count but for the last numbers.
  static void gated(const redraft_gate_call &c, int64_t row, int64_t i, int64_t count) {
    const float *from = c.x + row * 2 * c.n + i;
    const auto bytes = static_cast<size_t>(count) * sizeof(float);
    Floats g{}, u{}, factors = all(1.0f);
    memcpy(&g, from, bytes);
    memcpy(&u, from + c.n, bytes);
    if (c.factors) memcpy(&factors, c.factors + i, bytes);
    const Floats one = all(1.0f), e = exp(g < all(0.0f) ? g : -g);
    const Floats y = g * ((g < all(0.0f) ? e : one) / (one + e)) * u * factors;
    memcpy(c.y + row * c.n + i, &y, bytes);
  }

  static void gate(const redraft_gate_call &c, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      int64_t i = 0;
      for (; i + kLanes <= c.n; i += kLanes) gated(c, row, i, kLanes);
      if (i < c.n) gated(c, row, i, c.n - i);
    }
  }

  // ---- New rows.

  template <typename Number>
  static void rotate(const redraft_attention_call &c, const float *from, int64_t position, float scale, Number *to) {
    const int64_t size = c.head_dim, half = size / 2;
    if (!c.cosines) {
      for (int64_t i = 0; i < size; ++i) to[i] = rounded<Number>(from[i] * scale);
      return;
    }
    const float *cosines = c.cosines + position * half, *sines = c.sines + position * half;
    if (c.interleaved) {
      for (int64_t i = 0; i < half; ++i) {
        const float a = from[2 * i], b = from[2 * i + 1];
        to[2 * i] = rounded<Number>(::fmaf(a, cosines[i], -(b * sines[i])) * scale);
        to[2 * i + 1] = rounded<Number>(::fmaf(a, sines[i], b * cosines[i]) * scale);
      }
      return;
    }
    for (int64_t i = 0; i < half; ++i) {
      const float a = from[i], b = from[i + half];
      to[i] = rounded<Number>(::fmaf(a, cosines[i], -(b * sines[i])) * scale);
      to[i + half] = rounded<Number>(::fmaf(a, sines[i], b * cosines[i]) * scale);
    }
  }

  static void write(Plan &plan, int64_t first, int64_t last) {
    plan.call->half ? write_rows<Half>(plan, first, last) : write_rows<float>(plan, first, last);
  }

  template <typename Number>
  static void write_rows(Plan &plan, int64_t first, int64_t last) {
    const auto &c = *plan.call;
    auto *const keys = static_cast<Number *>(c.key_cache), *const values = static_cast<Number *>(c.value_cache);
    const int64_t size = c.head_dim;
    for (int64_t row = first; row < last; ++row) {
      const int64_t place = c.packed_rows ? c.packed_rows[row] : row, position = c.positions[row];
      const int64_t sequence = place / c.nodes, at = c.cache_len[sequence] + place % c.nodes;
      for (int64_t head = 0; head < c.q_heads; ++head) {
        rotate(c, c.q + row * c.q_stride + head * size, position, c.scale,
               plan.q.data() + (row * c.q_heads + head) * size);
      }
      for (int64_t head = 0; head < c.kv_heads; ++head) {
        const int64_t to = ((sequence * c.kv_heads + head) * c.capacity + at) * size;
        rotate(c, c.k + row * c.k_stride + head * size, position, 1.0f, keys + to);
        const float *v = c.v + row * c.v_stride + head * size;
        for (int64_t i = 0; i < size; ++i) values[to + i] = rounded<Number>(v[i]);
      }
    }
  }

  // ---- A block of a tile.

  // Where a thread computes a block.
  struct Work {
    alignas(64) float keys[kMostDim * kKeys];  // of a group, [D, kKeys]
    alignas(64) float scores[kTileRows * kBlock];
    alignas(64) float sums[kTileRows * (kMostDim + 2)], joined[kTileRows * (kMostDim + 2)];
    const float *q[kTileRows];
    const Node *node[kTileRows];
  };

  // Packs up to kKeys keys; missing ones are 0.
  template <typename Number>
  static void pack(const Number *const *rows, int64_t count, int64_t size, float *keys, int64_t ahead = 0) {
    static constexpr Number kNone[kMostDim] = {};
    const Number *from[kKeys];
    for (int64_t key = 0; key < kKeys; ++key) from[key] = key < count ? rows[key] : kNone;
    for (int64_t i = 0; i < size; i += 8) {
      if (i % 16 == 0) {
        for (int64_t key = 0; key < kKeys; ++key) __builtin_prefetch(from[key] + ahead + i);
      }
      Isa::transpose(from, i, keys + i * kKeys);
      Isa::transpose(from + 8, i, keys + i * kKeys + 8);
    }
  }

  // Writes scores of kRows rows and a packed group of keys.
  template <int kRows, typename Number>
  static void score(const float *const *q, const float *keys, int64_t size, float *scores, const Number *ahead,
                    int64_t step) {
    Floats sums[kRows][kVectors] = {};
    for (int64_t i = 0; i < size; ++i, keys += kKeys, ahead += step) {
      __builtin_prefetch(ahead);
      Floats of[kVectors];
      for (int v = 0; v < kVectors; ++v) of[v] = load(keys + v * kLanes);
      for (int row = 0; row < kRows; ++row) {
        const Floats x = all(q[row][i]);
        for (int v = 0; v < kVectors; ++v) sums[row][v] = Isa::fma(x, of[v], sums[row][v]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) store(scores + row * kBlock + v * kLanes, sums[row][v]);
    }
  }

  template <int kRows = Isa::kMostRows, typename Number>
  static void score_all(const float *const *q, const float *keys, int64_t size, float *scores, int64_t rows,
                        const Number *ahead, int64_t step = 16) {
    for (; rows >= kRows; rows -= kRows, q += kRows, scores += kRows * kBlock, step = 0)
      score<kRows>(q, keys, size, scores, ahead, step);
    if constexpr (kRows > 1) {
      if (rows > 0) score_all<kRows - 1>(q, keys, size, scores, rows, ahead, step);
    }
  }

  // Adds p times values of the rows first .. last - 1 to kVec vectors of the sums of kRows rows.
  template <int kRows, int kVec, typename Number>
  static void add(const float *p, const Number *values, int64_t size, int64_t count, float *sums) {
    Floats of[kRows][kVec];
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVec; ++v) of[row][v] = load(sums + row * size + v * kLanes);
    }
    for (int64_t key = 0; key < count; ++key, values += size) {
      Floats value[kVec];
      for (int v = 0; v < kVec; ++v) value[v] = load(values + v * kLanes);
      for (int row = 0; row < kRows; ++row) {
        const Floats share = all(p[row * kBlock + key]);
        for (int v = 0; v < kVec; ++v) of[row][v] = Isa::fma(share, value[v], of[row][v]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVec; ++v) store(sums + row * size + v * kLanes, of[row][v]);
    }
  }

  template <int kRows, int kVec, typename Number>
  static void add_columns(const float *p, const Number *values, int64_t size, int64_t count, float *sums,
                          int64_t left) {
    for (; left >= kVec * kLanes; left -= kVec * kLanes, values += kVec * kLanes, sums += kVec * kLanes) {
      add<kRows, kVec>(p, values, size, count, sums);
    }
    if constexpr (kVec > 1) {
      if (left > 0) add_columns<kRows, kVec / 2>(p, values, size, count, sums, left);
    }
  }

  // Values of `count` following rows, for `rows` rows of sums.
  template <int kRows = 6, typename Number>
  static void add_all(const float *p, const Number *values, int64_t size, int64_t count, float *sums, int64_t rows) {
    constexpr int kVec = kRows == 1 ? 8 : kRows <= 3 ? 4 : 2;
    for (; rows >= kRows; rows -= kRows, p += kRows * kBlock, sums += kRows * size) {
      add_columns<kRows, kVec>(p, values, size, count, sums, size);
    }
    if constexpr (kRows > 1) {
      if (rows > 0) add_all<kRows - 1>(p, values, size, count, sums, rows);
    }
  }

  // Turns the scores of columns first .. last - 1 of a block into exponentials. Writes the largest score and their sum.
  static void soften(float *scores, int64_t first, int64_t last, float cap, float *largest, float *sum) {
    const int64_t begin = first / kKeys * kKeys, end = (last + kKeys - 1) / kKeys * kKeys;
    if (cap > 0) {
      for (int64_t i = begin; i < end; i += kLanes) store(scores + i, capped(load(scores + i), all(cap)));
    }
    std::fill(scores + begin, scores + first, -INFINITY);
    std::fill(scores + last, scores + end, -INFINITY);
    Floats lanes[kVectors];
    for (int v = 0; v < kVectors; ++v) lanes[v] = all(-INFINITY);
    for (int64_t i = begin; i < end; i += kKeys) {
      for (int v = 0; v < kVectors; ++v) lanes[v] = larger(load(scores + i + v * kLanes), lanes[v]);
    }
    const float most = reduced(lanes, [](float a, float b) { return a > b ? a : b; });
    for (int64_t i = begin; i < end; i += kLanes) store(scores + i, exp(load(scores + i) - all(most)));
    std::fill(scores + begin, scores + first, 0.0f);
    std::fill(scores + last, scores + end, 0.0f);
    for (int v = 0; v < kVectors; ++v) lanes[v] = all(0.0f);
    for (int64_t i = begin; i < end; i += kKeys) {
      for (int v = 0; v < kVectors; ++v) lanes[v] = lanes[v] + load(scores + i + v * kLanes);
    }
    *largest = most;
    *sum = reduced(lanes, [](float a, float b) { return a + b; });
  }

  // Computes the sums of one block: o [rows, D], then m [rows], then l [rows]; l is 0 for rows that see none of it.
  template <typename Number>
  static void block(const Plan &plan, const Tile &tile, int64_t head, int64_t number, Work &work, float *sums) {
    const auto &c = *plan.call;
    const int64_t size = c.head_dim, groups = plan.groups(), rows = tile.count * groups;
    const int64_t start = number * kBlock, stop = start + kBlock;
    const int64_t cache = (tile.sequence * c.kv_heads + head) * c.capacity * size;
    const Number *keys = static_cast<const Number *>(c.key_cache) + cache;
    const Number *values = static_cast<const Number *>(c.value_cache) + cache;
    const int64_t past = c.cache_len[tile.sequence];
    float *largest = sums + rows * size, *total = largest + rows;
    memset(sums, 0, static_cast<size_t>(rows * plan.partial_floats()) * sizeof(float));
    int64_t low = stop, high = start;
    for (int64_t row = 0; row < rows; ++row) {
      const Node &node = plan.nodes[static_cast<size_t>(tile.first + row / groups)];
      work.node[row] = &node;
      work.q[row] = plan.q.data() + (node.row * c.q_heads + head * groups + row % groups) * size;
      low = std::min(low, std::max(start, node.begin));
      high = std::max(high, std::min(stop, node.prefix));
    }
    const Number *from[kKeys];
    for (int64_t group = low / kKeys * kKeys; group < high; group += kKeys) {
      const int64_t count = std::min(kKeys, high - group);
      for (int64_t key = 0; key < count; ++key) from[key] = keys + (group + key) * size;
      pack(from, count, size, work.keys, 2 * kKeys * size);
      score_all(work.q, work.keys, size, work.scores + (group - start), rows, values + group * size);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const Node &node = *work.node[row];
      float *scores = work.scores + row * kBlock;
      const int64_t first = std::max(start, node.begin), last = std::min(stop, node.end);
      if (first >= last) continue;
      for (int64_t at = std::max(first, node.prefix); at < last;) {
        float some[kKeys];
        const int64_t count = std::min(kKeys, last - at);
        for (int64_t key = 0; key < count; ++key) from[key] = keys + tail_row(plan, node, past, at + key) * size;
        pack(from, count, size, work.keys);
        score<1>(work.q + row, work.keys, size, some, some, 0);
        memcpy(scores + (at - start), some, static_cast<size_t>(count) * sizeof(float));
        at += count;
      }
      soften(scores, first - start, last - start, c.softcap, largest + row, total + row);
    }
    for (int64_t row = 0; row < rows;) {
      const int64_t several = std::min<int64_t>(6, rows - row);
      int64_t first = start, last = stop;  // of the columns that all of these rows have
      for (int64_t each = row; each < row + several; ++each) {
        first = std::max(first, work.node[each]->begin);
        last = std::min(last, work.node[each]->prefix);
      }
      const bool together = first < last;
      for (int64_t each = row; each < row + several; ++each) {
        const Node &node = *work.node[each];
        const int64_t end = std::min(stop, together ? first : node.prefix);
        add_some(work, each, std::max(start, node.begin), end, start, size, values, sums);
      }
      if (together) {
        add_all(work.scores + row * kBlock + (first - start), values + first * size, size, last - first,
                sums + row * size, several);
      }
      for (int64_t each = row; each < row + several; ++each) {
        const Node &node = *work.node[each];
        if (together) add_some(work, each, last, std::min(stop, node.prefix), start, size, values, sums);
        for (int64_t at = std::max({start, node.begin, node.prefix}); at < std::min(stop, node.end); ++at) {
          add_all(work.scores + each * kBlock + (at - start), values + tail_row(plan, node, past, at) * size, size, 1,
                  sums + each * size, 1);
        }
      }
      row += several;
    }
  }

  template <typename Number>
  static void add_some(const Work &work, int64_t row, int64_t first, int64_t last, int64_t start, int64_t size,
                       const Number *values, float *sums) {
    if (first >= last) return;
    add_all(work.scores + row * kBlock + (first - start), values + first * size, size, last - first, sums + row * size,
            1);
  }

  static int64_t tail_row(const Plan &plan, const Node &node, int64_t past, int64_t position) {
    return past + plan.tails[static_cast<size_t>(node.tail + position - node.prefix)];
  }

  // ---- Blocks joined.

  // Joins a block's sums, in the same form, to those of the blocks before it.
  static void join(float *joined, const float *sums, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; ++row) {
      const float m = sums[rows * size + row], l = sums[rows * (size + 1) + row];
      if (l == 0) continue;
      join_row(joined, rows, row, size, m, l, sums + row * size);
    }
  }

  static void join_row(float *joined, int64_t rows, int64_t row, int64_t size, float m, float l, const float *o) {
    float &most = joined[rows * size + row], &total = joined[rows * (size + 1) + row];
    float *out = joined + row * size;
    const bool none = total == 0;
    const float next = none || m > most ? m : most;
    const float before = none ? 0 : exp_of(most - next), now = exp_of(m - next);
    total = ::fmaf(total, before, l * now);
    if (o != nullptr) {
      for (int64_t i = 0; i < size; i += kLanes) {
        store(out + i, Isa::fma(load(out + i), all(before), load(o + i) * all(now)));
      }
    } else {
      for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(out + i) * all(before));
    }
    most = next;
  }

  static void finish(const Plan &plan, const Tile &tile, int64_t head, float *joined) {
    const auto &c = *plan.call;
    const int64_t size = c.head_dim, groups = plan.groups(), rows = tile.count * groups;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t q_head = head * groups + row % groups;
      if (c.sinks) join_row(joined, rows, row, size, c.sinks[q_head], 1.0f, nullptr);
      const Floats share = all(1.0f / joined[rows * (size + 1) + row]);
      float *out = c.out + (plan.nodes[static_cast<size_t>(tile.first + row / groups)].row * c.q_heads + q_head) * size;
      for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(joined + row * size + i) * share);
    }
  }

  static void clear(float *joined, int64_t rows, int64_t size) {
    memset(joined, 0, static_cast<size_t>(rows * (size + 2)) * sizeof(float));
  }

  static void attend(Plan &plan, int64_t first, int64_t last) {
    thread_local Work work;
    const auto &c = *plan.call;
    const auto compute = c.half ? block<Half> : block<float>;
    for (int64_t task = first; task < last; ++task) {
      const int64_t which = task / c.kv_heads, head = task % c.kv_heads;
      if (plan.split) {
        const Tile &tile = plan.tiles[static_cast<size_t>(plan.tile_of[static_cast<size_t>(which)])];
        const int64_t number = tile.first_block + which - tile.pair;
        compute(plan, tile, head, number, work, plan.partial(tile, number, head));
        continue;
      }
      const Tile &tile = plan.tiles[static_cast<size_t>(which)];
      const int64_t rows = tile.count * plan.groups();
      clear(work.joined, rows, c.head_dim);
      for (int64_t number = tile.first_block; number < tile.last_block; ++number) {
        compute(plan, tile, head, number, work, work.sums);
        join(work.joined, work.sums, rows, c.head_dim);
      }
      finish(plan, tile, head, work.joined);
    }
  }

  static void merge(Plan &plan, int64_t first, int64_t last) {
    thread_local float joined[kTileRows * (kMostDim + 2)];
    const auto &c = *plan.call;
    for (int64_t task = first; task < last; ++task) {
      const Tile &tile = plan.tiles[static_cast<size_t>(task / c.kv_heads)];
      const int64_t head = task % c.kv_heads, rows = tile.count * plan.groups();
      clear(joined, rows, c.head_dim);
      for (int64_t number = tile.first_block; number < tile.last_block; ++number) {
        join(joined, plan.partial(tile, number, head), rows, c.head_dim);
      }
      finish(plan, tile, head, joined);
    }
  }
};

}  // namespace
