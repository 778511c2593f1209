// Products y = x W^T + bias of fp32 activations x with weights of 8 or 4 bits, in blocks of inputs that share a scale.
//
// Activations are rounded to 8 bits for each row and block of inputs:
//
//   a_scale = max |x| / 127, in fp32
//   q       = x / a_scale, to the nearest integer, ties to even, within -127 .. 127; 0 if a_scale is 0
//
// With s = sum over the block's inputs of q * (code - zero_point), exact in int32, y begins at 0 and, block by block in
// ascending order, becomes fma(a_scale * w_scale, s, y) in fp32, the product of scales rounded first. bias is added last.
// So a row's outputs have the same bits in every batch, tile, thread and instruction set. A row with an infinity or a
// NaN gives NaN, whose sign and payload are open.
//
//   pack once; then for each x: quantize rows, and when all are done, multiply tiles. Threads may share both.
//
// Nothing in quantize and multiply allocates, throws or locks. Arguments are not checked there.

#pragma once

#include <stdint.h>

#define REDRAFT_PRODUCTS_ABI 2
#define REDRAFT_PRODUCTS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

REDRAFT_PRODUCTS_API int redraft_products_abi(void);

// "amx", "avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dot" or "scalar": the best of this CPU and build, or the one in use.
REDRAFT_PRODUCTS_API const char *redraft_products_isa(void);

// Chooses an instruction set, for tests. Not between quantize and multiply. Returns 0, or 1 if it is not there.
REDRAFT_PRODUCTS_API int redraft_products_use(const char *isa);

// Weights as ONNX Runtime's MatMulNBits has them.
typedef struct {
  int64_t n, k;                // outputs and inputs, each below 2^31
  int32_t bits, block;         // 4 or 8; inputs that share a scale: a power of two from 16 to 256
  const uint8_t *codes;        // [n, ceil(k / block), block * bits / 8], the first input in the low bits
  const float *scales;         // [n, ceil(k / block)]
  const uint8_t *zero_points;  // [n, ceil(ceil(k / block) * bits / 8)], the first in the low bits; null: 2^(bits - 1)
} redraft_block_matrix;

// Returns the bytes of the packed form, a multiple of 64, or 0 if the matrix is refused.
REDRAFT_PRODUCTS_API int64_t redraft_products_packed_bytes(const redraft_block_matrix *matrix);

// Writes the packed form, which does not depend on the instruction set, at a multiple of 64. Returns 0, or 1 if refused.
REDRAFT_PRODUCTS_API int redraft_products_pack(const redraft_block_matrix *matrix, void *packed);

// Returns the bytes of quantized activations of `rows` rows.
REDRAFT_PRODUCTS_API int64_t redraft_products_scratch_bytes(const void *packed, int64_t rows);

// Returns the number of column tiles, the unit that threads share.
REDRAFT_PRODUCTS_API int64_t redraft_products_tiles(const void *packed);

// Quantizes rows first .. last - 1 of x [rows, k] into scratch, at a multiple of 64.
REDRAFT_PRODUCTS_API void redraft_products_quantize(const void *packed, const float *x, int64_t rows, int64_t first,
                                                    int64_t last, void *scratch);

// Writes the columns of tiles first .. last - 1 of y [rows, n]. bias [n] may be null.
REDRAFT_PRODUCTS_API void redraft_products_multiply(const void *packed, const void *scratch, int64_t rows,
                                                    const float *bias, float *y, int64_t first, int64_t last);

#ifdef __cplusplus
}
#endif
