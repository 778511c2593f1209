// Vectors of ARM: a tile's columns in four registers.

#pragma once

#include <arm_neon.h>
#include <stdint.h>

namespace {

struct Neon {
  using Ints = int32x4_t;
  using Floats = float32x4_t;
  template <int kBits>
  using Input = int8_t;
  using Registers = AnyRegisters;
  static constexpr int kUnit = 4, kLeastRows = 1, kTiles = 1, kVectors = 4;

  static Ints ints(int32_t value) { return vdupq_n_s32(value); }
  static Ints inputs(const uint8_t *q) { return ints(load_int(q)); }
  static int32_t zero_code(int32_t code) { return code; }
  static Ints zero_points(const uint8_t *from) {
    const int32_t four[4] = {from[0], from[1], from[2], from[3]};
    return vld1q_s32(four);
  }
  static Floats floats(float value) { return vdupq_n_f32(value); }
  static Floats load_floats(const void *from) {
    return vreinterpretq_f32_u8(vld1q_u8(static_cast<const uint8_t *>(from)));
  }
  static Floats to_floats(Ints values) { return vcvtq_f32_s32(values); }
  static void store(float *to, Floats values) { vst1q_f32(to, values); }
  static Ints times(Ints a, Ints b) { return vmulq_s32(a, b); }
  static Floats times(Floats a, Floats b) { return vmulq_f32(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }

  static uint8x16_t load_bytes(const uint8_t *from) { return vld1q_u8(from); }
  static uint8x16_t low_halves(uint8x16_t bytes) { return vandq_u8(bytes, vdupq_n_u8(15)); }
  static uint8x16_t high_halves(uint8x16_t bytes) { return vshrq_n_u8(bytes, 4); }
};

}  // namespace
