// The kernels of one instruction set, chosen when first used.

#pragma once

#include <string.h>

#include <atomic>

namespace redraft {

// Kernels: a struct with the members `const char *isa` and `bool (*is_here)()`.
template <typename Kernels, int kCount>
class Chosen {
 public:
  // The best first; the last is there on every CPU.
  constexpr explicit Chosen(const Kernels *const (&all)[kCount]) : all_(all) {}

  const Kernels &get() {
    const Kernels *found = in_use_.load(std::memory_order_relaxed);
    for (int i = 0; found == nullptr; ++i) {
      if (all_[i]->is_here()) found = all_[i];
    }
    in_use_.store(found, std::memory_order_relaxed);
    return *found;
  }

  // Returns 0, or 1 if the instruction set is not there.
  int use(const char *isa) {
    for (const Kernels *each : all_) {
      if (strcmp(each->isa, isa) != 0 || !each->is_here()) continue;
      in_use_.store(each, std::memory_order_relaxed);
      return 0;
    }
    return 1;
  }

 private:
  const Kernels *const (&all_)[kCount];
  std::atomic<const Kernels *> in_use_{nullptr};
};

}  // namespace redraft
