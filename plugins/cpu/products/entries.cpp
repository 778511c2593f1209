// The C entries that choose an instruction set and call it.

#include <string.h>

#include <atomic>

#include "packed.h"
#include "products.h"

namespace redraft::products {
namespace {

// The best first.
const Kernels *const kAll[] = {
#ifdef REDRAFT_AVX512_VNNI
    &kAvx512Vnni,
#endif
#ifdef REDRAFT_AVX_VNNI
    &kAvxVnni,
#endif
#ifdef REDRAFT_AVX2
    &kAvx2,
#endif
#ifdef REDRAFT_NEON_DOT
    &kNeonDot,
#endif
    &kScalar,
};

std::atomic<const Kernels *> in_use{nullptr};

const Kernels &kernels() {
  const Kernels *found = in_use.load(std::memory_order_relaxed);
  if (found != nullptr) return *found;
  for (const Kernels *each : kAll) {
    if (!each->is_here()) continue;
    found = each;
    break;
  }
  in_use.store(found, std::memory_order_relaxed);
  return *found;
}

const Packed &matrix(const void *packed) { return *static_cast<const Packed *>(packed); }

}  // namespace
}  // namespace redraft::products

using namespace redraft::products;

int redraft_products_abi(void) { return REDRAFT_PRODUCTS_ABI; }

const char *redraft_products_isa(void) { return kernels().isa; }

int redraft_products_use(const char *isa) {
  for (const Kernels *each : kAll) {
    if (strcmp(each->isa, isa) != 0 || !each->is_here()) continue;
    in_use.store(each, std::memory_order_relaxed);
    return 0;
  }
  return 1;
}

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
