// A product by oneDNN over copies of weights, for peers.py. Activations are in fp32, or in 8 bits with a scale for each
// row and block of inputs, which are computed here: oneDNN takes them as they are.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

using namespace dnnl;
using tag = memory::format_tag;
using type = memory::data_type;

namespace {

struct Call {
  matmul product;
  memory x, x_scales, y;
};

struct Peer {
  engine on{engine::kind::cpu, 0};
  stream queue{on};
  int64_t k, n, block;
  bool dynamic;
  std::vector<memory> weights;
  memory scales;
  std::map<int64_t, Call> calls;  // by rows

  matmul::primitive_desc described(int64_t rows, const memory::desc &stored) {
    primitive_attr with;
    with.set_scales(DNNL_ARG_WEIGHTS, 3, {block, 1}, type::f32);
    if (dynamic) {
      with.set_scales(DNNL_ARG_SRC, 3, {1, block}, type::f32);
    } else {
      with.set_fpmath_mode(fpmath_mode::strict, true);
    }
    return {on, {{rows, k}, dynamic ? type::s8 : type::f32, tag::ab}, stored, {{rows, n}, type::f32, tag::ab}, with};
  }

  Call &call(int64_t rows) {
    if (const auto found = calls.find(rows); found != calls.end()) return found->second;
    const auto with = described(rows, weights[0].get_desc());
    const memory::desc of_x({rows, k / block}, type::f32, tag::ab);
    return calls[rows] = {matmul(with), {with.src_desc(), on}, {of_x, on}, {with.dst_desc(), on}};
  }
};

void quantize(const float *x, int64_t count, int8_t *q, float *scale) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, fabsf(x[i]));
  *scale = most / 127;
  for (int64_t i = 0; i < count; ++i) q[i] = static_cast<int8_t>(nearbyintf(x[i] / *scale));
}

}  // namespace

extern "C" {

// codes: signed, [k, n], pairs of 4 bits joined.   scales: [k / block, n].
Peer *peer_open(int64_t k, int64_t n, int64_t block, int bits, int dynamic, int64_t copies, const void *codes,
                const float *scales) {
  auto *peer = new Peer;
  peer->k = k;
  peer->n = n;
  peer->block = block;
  peer->dynamic = dynamic;
  const auto of = bits == 8 ? type::s8 : type::s4;
  memory plain({{k, n}, of, tag::ab}, peer->on);
  memcpy(plain.get_data_handle(), codes, static_cast<size_t>(k * n * bits / 8));
  const auto best = peer->described(8, {{k, n}, of, tag::any}).weights_desc();
  for (int64_t copy = 0; copy < copies; ++copy) {
    memory &made = peer->weights.emplace_back(best, peer->on);
    if (best == plain.get_desc()) {  // it has no order of its own for 4 bits
      memcpy(made.get_data_handle(), codes, best.get_size());
    } else {
      reorder(plain, made).execute(peer->queue, plain, made);
    }
  }
  peer->scales = memory({{k / block, n}, type::f32, tag::ab}, peer->on);
  memcpy(peer->scales.get_data_handle(), scales, static_cast<size_t>(k / block * n) * sizeof(float));
  peer->queue.wait();
  return peer;
}

void peer_close(Peer *peer) { delete peer; }

int64_t peer_bytes(const Peer *peer) {
  return static_cast<int64_t>(peer->weights[0].get_desc().get_size() + peer->scales.get_desc().get_size());
}

// y: [rows, n], of the first copy.
void peer_run(Peer *peer, int64_t rows, const float *x, float *y) {
  Call &call = peer->call(rows);
  if (peer->dynamic) {
    auto *q = static_cast<int8_t *>(call.x.get_data_handle());
    auto *scales = static_cast<float *>(call.x_scales.get_data_handle());
    for (int64_t i = 0; i < rows * peer->k; i += peer->block) quantize(x + i, peer->block, q + i, scales++);
  } else {
    memcpy(call.x.get_data_handle(), x, static_cast<size_t>(rows * peer->k) * sizeof(float));
  }
  for (const memory &weights : peer->weights) {
    std::unordered_map<int, memory> with{{DNNL_ARG_SRC, call.x},
                                         {DNNL_ARG_WEIGHTS, weights},
                                         {DNNL_ARG_DST, call.y},
                                         {DNNL_ARG_ATTR_SCALES | DNNL_ARG_WEIGHTS, peer->scales}};
    if (peer->dynamic) with[DNNL_ARG_ATTR_SCALES | DNNL_ARG_SRC] = call.x_scales;
    call.product.execute(peer->queue, with);
  }
  peer->queue.wait();
  memcpy(y, call.y.get_data_handle(), static_cast<size_t>(rows * peer->n) * sizeof(float));
}
}
