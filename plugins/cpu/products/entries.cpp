// The C entries that choose an instruction set and call it.

#include "../chosen.h"
#include "packed.h"
#include "products.h"

namespace redraft::products {
namespace {

// The best first.
const Kernels *const kAll[] = {
#ifdef REDRAFT_AMX
    &kAmx,
#endif
#ifdef REDRAFT_AVX512_VNNI
    &kAvx512Vnni,
#endif
#ifdef REDRAFT_AVX_VNNI
    &kAvxVnni,
#endif
#ifdef REDRAFT_AVX2
    &kAvx2,
#endif
#ifdef REDRAFT_NEON_I8MM
    &kNeonI8mm,
#endif
#ifdef REDRAFT_NEON_DOT
    &kNeonDot,
#endif
    &kScalar,
};

Chosen chosen(kAll);

const Kernels &kernels() { return chosen.get(); }

const Packed &matrix(const void *packed) { return *static_cast<const Packed *>(packed); }

}  // namespace
}  // namespace redraft::products

using namespace redraft::products;

int redraft_products_abi(void) { return REDRAFT_PRODUCTS_ABI; }

const char *redraft_products_isa(void) { return kernels().isa; }

int redraft_products_use(const char *isa) { return chosen.use(isa); }

int64_t redraft_products_tiles(const void *packed) { return matrix(packed).tiles; }

int64_t redraft_products_scratch_bytes(const void *packed, int64_t rows) {
  return kernels().scratch_bytes(matrix(packed), rows);
}

void redraft_products_quantize(const void *packed, const float *x, int64_t rows, int64_t first, int64_t last,
                               void *scratch) {
  kernels().quantize(matrix(packed), x, rows, first, last, static_cast<uint8_t *>(scratch));
}

void redraft_products_multiply(const void *packed, const void *scratch, int64_t rows, const float *bias, float *y,
                               int64_t first, int64_t last) {
  kernels().multiply(matrix(packed), static_cast<const uint8_t *>(scratch), rows, bias, y, first, last);
}
