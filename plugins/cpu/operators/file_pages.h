#pragma once

#include <stdint.h>

namespace redraft::operators {

// Gives the memory of whole pages back to the machine if they are a private mapping of a file: the next read takes them
// from the file again. Does nothing with other memory. Nothing may have been written there.
void give_back_file_pages(const void *begin, int64_t bytes);

}  // namespace redraft::operators
