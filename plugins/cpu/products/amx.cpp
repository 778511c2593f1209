// AMX: tdpbsud multiplies a tile of 16 rows and 64 inputs with a tile of those inputs and 16 columns. With few rows,
// AVX-512 VNNI is as fast or faster.

#include <sys/syscall.h>
#include <unistd.h>

#include "multiply.h"
#include "tiles.h"
#include "zmm.h"

namespace {

constexpr int kFewRows = 32;  // fewer than these
constexpr int kInputs = 256;  // whose sums are found before they are added: memory is slow between tiles and vectors

struct Amx : Zmm {
  using One = Amx;
  static constexpr int kTiles = 1, kVectors = 1, kMostRows = 16, kUnit = 64;
  static constexpr int kLeastRows = 11;  // of a group of 32 rows or more

  // Registers 0 and 1 have sums, 2 and 3 inputs of rows, 4 and 5 codes, so that two blocks overlap.
  struct Registers {
    Registers(int64_t rows, int64_t block) {
      const int64_t unit = block < kUnit ? block : kUnit;
      TileShapes shapes;
      for (int number = 0; number < 6; ++number) {
        shapes.rows[number] = static_cast<uint8_t>(number < 4 ? rows : unit / 4);
        shapes.bytes[number] = static_cast<uint16_t>(number / 2 == 1 ? unit : kLine);
      }
      before = begin_tiles(shapes);
    }
    ~Registers() { end_tiles(before); }

    TileShapes before;
  };
};

// The sums of a block without zero points.
struct alignas(kLine) Sums {
  int32_t of[Amx::kMostRows][kColumns];
};

template <int kTile>
inline __attribute__((always_inline)) void find_sums(Sums &sums, const uint8_t *bytes, const uint8_t *q, int64_t rows,
                                                     int inputs) {
  const int unit = inputs < Amx::kUnit ? inputs : Amx::kUnit;
  zero_tile<kTile>();
  for (int first = 0; first < inputs; first += unit, q += rows * unit, bytes += unit * kColumns) {
    load_tile<kTile + 2>(q, unit);
    load_tile<kTile + 4>(bytes, kLine);
    add_tile_products<kTile, kTile + 2, kTile + 4>();
  }
  store_tile<kTile>(sums.of, kLine);
}

// Spreads codes of 4 bits to bytes.
inline void spread(uint8_t *bytes, const uint8_t *codes, int inputs) {
  for (int line = 0; line < inputs / 8; ++line) {
    const auto both = Zmm::load_bytes(codes + line * kLine);
    Zmm::store_bytes(bytes + 2 * line * kLine, Zmm::low_halves(both));
    Zmm::store_bytes(bytes + (2 * line + 1) * kLine, Zmm::high_halves(both));
  }
}

template <int kBits, int kBlock, int kRows>
struct Group<Amx, kBits, kBlock, kRows> {
  static void multiply(const Packed &m, const Part &part, const uint8_t *q, float (*y)[kColumns]) {
    const int inputs = kBlock == 0 ? m.block : kBlock;
    const int64_t codes = kColumns * inputs * kBits / 8, block_bytes = codes + kScaleBytes;
    const int64_t q_bytes = kRows * (8 + inputs);
    const uint8_t *zero_points = part.tile + m.blocks * block_bytes;
    Sums sums[kBlock == 0 ? kInputs / 16 : kInputs / kBlock];
    alignas(kLine) uint8_t bytes[kBits == 4 ? kInputs * kColumns : 1];
    __m512 total[kRows];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      total[row] = part.first == 0 ? Amx::floats(0) : Amx::load_floats(y[row]);
    }
    const int step = kInputs / inputs;
    for (int64_t begin = part.first; begin < part.last; begin += step) {
      const int64_t end = begin + step < part.last ? begin + step : part.last;
      for (int64_t block = begin; kBits == 4 && block < end; ++block) {
        spread(bytes + (block - begin) * inputs * kColumns, part.tile + block * block_bytes, inputs);
      }
      for (int64_t block = begin; block < end; ++block) {
        const uint8_t *from =
            kBits == 4 ? bytes + (block - begin) * inputs * kColumns : part.tile + block * block_bytes;
        const uint8_t *rows = q + block * q_bytes + 8 * kRows;
        if (block % 2 == 0) {
          find_sums<0>(sums[block - begin], from, rows, kRows, inputs);
        } else {
          find_sums<1>(sums[block - begin], from, rows, kRows, inputs);
        }
      }
      for (int64_t block = begin; block < end; ++block) {
        const uint8_t *here = part.tile + block * block_bytes, *rows = q + block * q_bytes;
        const uint8_t *later = part.loads ? here + kAhead : here;
        const __m512 scales = Amx::load_floats(here + codes);
        int64_t line = 0;
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
          for (; line < block_bytes * (row + 1) / kRows; line += kLine) load_later(later + line);
          __m512i sum = Amx::ints(load_int(rows + 4 * (kRows + row)));
          if (m.has_zero_points) sum = Amx::times(Amx::zero_points(zero_points + block * kColumns), sum);
          sum = Amx::plus(sum, Amx::load_bytes(reinterpret_cast<const uint8_t *>(sums[block - begin].of[row])));
          const __m512 scale = Amx::times(scales, Amx::floats(load_float(rows + 4 * row)));
          total[row] = Amx::fma(scale, Amx::to_floats(sum), total[row]);
        }
      }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) Amx::store(y[row], total[row]);
  }
};

// Asks Linux for the tiles, which a process must.
bool is_here() {
#ifdef REDRAFT_EMULATED
  return true;
#else
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return redraft::products::kAvx512Vnni.is_here() && __builtin_cpu_supports("amx-int8") &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#endif
}

const Kernels &few_rows() { return redraft::products::kAvx512Vnni; }

int64_t scratch_bytes_of(const Packed &m, int64_t rows) {
  return rows < kFewRows ? few_rows().scratch_bytes(m, rows) : scratch_bytes<Amx>(m, rows) + Amx::kUnit;
}

void quantize_rows(const Packed &m, const float *x, int64_t rows, int64_t first, int64_t last, uint8_t *scratch) {
  (rows < kFewRows ? few_rows().quantize : quantize<Amx>)(m, x, rows, first, last, scratch);
}

void multiply_rows(const Packed &m, const uint8_t *scratch, int64_t rows, const float *bias, float *y, int64_t first,
                   int64_t last) {
  (rows < kFewRows ? few_rows().multiply : multiply<Amx>)(m, scratch, rows, bias, y, first, last);
}

}  // namespace

const Kernels redraft::products::kAmx = {"amx", is_here, scratch_bytes_of, quantize_rows, multiply_rows};
