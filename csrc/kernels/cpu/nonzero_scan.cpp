#include "kernels/cpu/nonzero_scan.h"

#include <algorithm>
#include <cstring>

namespace ddp_hooks::cpu {
namespace {

// Large enough that the test between blocks costs nothing, small enough that a dense gradient is found out at once.
constexpr int64_t kBlockElements = 1024;

template <typename Word>
ScanResult scan_words(const void* data, int64_t numel) {
  constexpr Word kMagnitude = static_cast<Word>(~Word{0}) >> 1;  // every bit but the sign
  const char* bytes = static_cast<const char*>(data);
  Word all_bits = 0;
  for (int64_t begin = 0; begin < numel; begin += kBlockElements) {
    const int64_t end = std::min(numel, begin + kBlockElements);
    Word block_bits = 0;
    for (int64_t i = begin; i < end; ++i) {
      Word word;
      std::memcpy(&word, bytes + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
      block_bits |= word;
    }
    if (block_bits & kMagnitude) return {true, false};
    all_bits |= block_bits;
  }
  return {false, all_bits != 0};
}

}  // namespace

ScanResult nonzero_scan(const void* data, int64_t numel, ElementType type) {
  switch (element_bytes(type)) {
    case 8:
      return scan_words<uint64_t>(data, numel);
    case 4:
      return scan_words<uint32_t>(data, numel);
    default:
      return scan_words<uint16_t>(data, numel);
  }
}

}  // namespace ddp_hooks::cpu
