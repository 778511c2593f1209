// Loads of memory into the cache ahead of its use.

#pragma once

#include <stdint.h>

namespace {

// Stays where it is written: the compiler would gather such loads, and a burst of them stops the core.
inline void load_later(const uint8_t *line) {
  __asm__ volatile("");
  __builtin_prefetch(line, 0, 2);
}

}  // namespace
