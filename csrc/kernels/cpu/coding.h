// Codes and decodes a section of blocks in CPU memory, with the fastest instructions that this processor has. All of
// them make the same bytes.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>

#include "kernels/element_type.h"

namespace ddp_hooks::cpu {

// Codes up to kSectionBlocks whole blocks of values to `to`, and returns the end. `to` has room for the head and the
// values of each block, and may be overwritten as far as that.
using EncodeSection = char* (*)(const char* values, int blocks, char* to);

// Where a section lies. What is behind it may be read, up to the end of the message.
struct Section {
  const char* begin;
  const char* end;
  const char* end_of_message;
};

// Writes the values of a section that was checked, or adds them.
using DecodeSection = void (*)(const Section& section, int blocks, char* to, bool adds);

struct SectionCoder {
  EncodeSection encode;
  DecodeSection decode;
};

SectionCoder section_coder(ElementType type);

}  // namespace ddp_hooks::cpu
