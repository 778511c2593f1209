#include "file_pages.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace redraft::operators {

void give_back_file_pages(const void *begin, int64_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t low = (first + page - 1) / page * page, high = (first + static_cast<uintptr_t>(bytes)) / page * page;
  FILE *maps = low < high ? fopen("/proc/self/maps", "re") : nullptr;
  if (maps == nullptr) return;
  char line[512];
  while (fgets(line, sizeof line, maps) != nullptr) {
    uintptr_t from = 0, to = 0;
    char shared = 0;
    unsigned long file = 0;  // its inode, 0 without one
    if (sscanf(line, "%lx-%lx %*3c%c %*x %*x:%*x %lu", &from, &to, &shared, &file) != 4)
      continue;  // rest of a long path
    if (to <= low || file == 0 || shared != 'p') continue;
    if (from >= high) break;
    madvise(reinterpret_cast<void *>(std::max(from, low)), std::min(to, high) - std::max(from, low), MADV_DONTNEED);
  }
  fclose(maps);
}

}  // namespace redraft::operators
