#include "agreement/mask_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <string>

namespace ddp_hooks {
namespace {

enum class MaskForm : uint64_t { kBitmap = 1, kSetBits = 2, kClearedBits = 3, kRuns = 4 };

// None is 0, so that a message which nobody wrote is no mask.
struct CodecHeader {
  MaskForm form = MaskForm::kBitmap;
  unsigned k = 0;       // of distances
  unsigned k_runs = 0;  // of the lengths of runs
  uint64_t count = 0;

  static constexpr unsigned kMostK = 40;
  static constexpr uint64_t kMostCount = (uint64_t{1} << 40) - 1;

  uint64_t word() const {
    return static_cast<uint64_t>(form) | uint64_t{k} << 8 | uint64_t{k_runs} << 16 | count << 24;
  }
};

// --- encoding

// The runs of set bits of a mask. Where they are few, one pass over the words is all that is made.
class RunsOfMask {
 public:
  explicit RunsOfMask(const UsageMask& mask) : words_(mask.words()), size_(mask.size()) {
    uint64_t before = 0;  // the bit before the word, in every place
    for (size_t i = 0; i < words_.size();) {
      const size_t end = std::min(i + kBlock, words_.size());
      // Most words of a mask that is worth compressing are like their neighbours.
      if (end - i == kBlock && is_block_of(before, words_.data() + i)) {
        set_bits_ += before & (64 * kBlock);
        i = end;
        continue;
      }
      for (; i < end; ++i) {
        const uint64_t word = words_[i];
        const uint64_t edges = word ^ (word << 1 | (before & 1));
        before = uint64_t{0} - (word >> 63);
        if (edges != 0) {
          take_edges(i, edges);
          set_bits_ += static_cast<uint64_t>(std::popcount(word));
        } else {
          set_bits_ += word & 64;
        }
      }
      listed_ = 2 * edges_.size() <= words_.size();  // a longer list costs more than it saves
    }
  }

  uint64_t set_bits() const { return set_bits_; }
  uint64_t count() const { return (edge_count_ + 1) / 2; }

  // Calls back with begin and end of each run, in order.
  template <typename Visit>
  void visit(const Visit& visit) const {
    size_t begin = 0;
    bool inside = false;
    const auto cross = [&](size_t edge) {
      if (inside) {
        visit(begin, edge);
      } else {
        begin = edge;
      }
      inside = !inside;
    };
    if (listed_) {
      for (const size_t edge : edges_) cross(edge);
    } else {
      for (size_t i = 0; i < words_.size(); ++i) {
        uint64_t edges = words_[i] ^ (words_[i] << 1 | uint64_t{inside});
        for (; edges != 0; edges &= edges - 1) cross(64 * i + static_cast<size_t>(std::countr_zero(edges)));
      }
    }
    // Bits above the size are zero, so a run ends there unless the size is that of the words.
    if (inside) visit(begin, size_);
  }

 private:
  static constexpr size_t kBlock = 8;

  static bool is_block_of(uint64_t expected, const uint64_t* words) {
    uint64_t different = 0;
    for (size_t i = 0; i < kBlock; ++i) different |= words[i] ^ expected;
    return different == 0;
  }

  void take_edges(size_t word, uint64_t edges) {
    edge_count_ += static_cast<uint64_t>(std::popcount(edges));
    if (!listed_) return;
    for (; edges != 0; edges &= edges - 1) edges_.push_back(64 * word + static_cast<size_t>(std::countr_zero(edges)));
  }

  const std::vector<uint64_t>& words_;
  const size_t size_;
  uint64_t set_bits_ = 0;
  uint64_t edge_count_ = 0;
  bool listed_ = true;
  std::vector<size_t> edges_;  // where a run begins, where it ends, and so on; of no use unless listed_
};

// Finds the best k for a sequence of numbers, by walks over it.
//
// With k a number takes k + 1 bits and its quotient by 2^k, so all take n (k + 1) + S(k). One more in k adds n and
// takes away S(k) - S(k + 1), the sum of half of each quotient, rounded up. As quotients fall with k, so does what is
// taken away: bits fall and then rise. And it is at most (sum / 2^k + n) / 2, so from sum <= n 2^k on bits do not fall.
class RiceSearch {
 public:
  RiceSearch(uint64_t count, uint64_t sum) : count_(count), sum_(sum) {
    unsigned highest = 0;
    while (count_ << highest < sum_ && highest < CodecHeader::kMostK) ++highest;
    lowest_ = highest - std::min(highest, kSteps - 1);
  }

  // What no k can undercut: a quotient is less than 1 below the fraction, by at most 1 - 1/2^k.
  uint64_t least_bits() const {
    uint64_t least = sum_ + count_;
    for (unsigned k = 1; k <= lowest_ + kSteps; ++k) least = std::min(least, count_ * k + ((sum_ + count_) >> k));
    return least;
  }

  void begin_walk() { quotients_ = {}; }
  void add(uint64_t value) {
    value >>= lowest_;
    for (uint64_t& quotient : quotients_) {
      quotient += value;
      value >>= 1;
    }
  }
  // After a walk: whether k and bits are known; if not, another walk has to be made.
  bool end_walk() {
    unsigned best = 0;
    for (unsigned step = 1; step < kSteps; ++step) {
      if (bits_with(step) < bits_with(best)) best = step;
    }
    k_ = lowest_ + best;
    bits_ = bits_with(best);
    if (best > 0 || lowest_ == 0) return true;
    lowest_ -= std::min(lowest_, kSteps - 1);
    return false;
  }

  unsigned k() const { return k_; }
  uint64_t bits() const { return bits_; }

 private:
  static constexpr unsigned kSteps = 4;  // tried in one walk; of random masks the first walk is enough

  uint64_t bits_with(unsigned step) const { return count_ * (lowest_ + step + 1) + quotients_[step]; }

  const uint64_t count_;
  const uint64_t sum_;
  unsigned lowest_ = 0;
  std::array<uint64_t, kSteps> quotients_{};
  unsigned k_ = 0;
  uint64_t bits_ = 0;
};

// Appends bits to words that are there already.
class BitWriter {
 public:
  explicit BitWriter(uint64_t* next) : next_(next) {}

  // A one after as many zeros as the quotient, then the remainder.
  void put_rice(uint64_t value, unsigned k) {
    const uint64_t quotient = value >> k;
    const uint64_t end = (value & ((uint64_t{1} << k) - 1)) << 1 | 1;
    if (quotient + k + 1 <= 64) {
      put(end << quotient, static_cast<unsigned>(quotient) + k + 1);
      return;
    }
    for (uint64_t zeros = quotient; zeros > 0;) {
      const uint64_t some = std::min<uint64_t>(zeros, 64);
      put(0, static_cast<unsigned>(some));
      zeros -= some;
    }
    put(end, k + 1);
  }

  void finish() {
    if (filled_ > 0) *next_ = buffer_;
  }

 private:
  void put(uint64_t bits, unsigned length) {
    buffer_ |= bits << filled_;
    if (filled_ + length < 64) {
      filled_ += length;
      return;
    }
    *next_++ = buffer_;
    buffer_ = filled_ > 0 ? bits >> (64 - filled_) : 0;
    filled_ = filled_ + length - 64;
  }

  uint64_t* next_;
  uint64_t buffer_ = 0;
  unsigned filled_ = 0;  // less than 64
};

size_t words_with(uint64_t bits) {
  return 1 + static_cast<size_t>((bits + 63) / 64);
}

std::vector<uint64_t> compress_to_bitmap(const UsageMask& mask) {
  std::vector<uint64_t> words;
  words.reserve(most_words(mask.size()));
  words.push_back(CodecHeader{}.word());
  words.insert(words.end(), mask.words().begin(), mask.words().end());
  return words;
}

// In each form the next bit that can be in question is `next`: past a run stands a bit that is known to be clear.
void write_set_bits(const RunsOfMask& runs, unsigned k, BitWriter& writer) {
  size_t next = 0;
  runs.visit([&](size_t begin, size_t end) {
    writer.put_rice(begin - next, k);
    for (size_t i = begin + 1; i < end; ++i) writer.put_rice(0, k);
    next = end;
  });
}

void write_cleared_bits(const RunsOfMask& runs, size_t size, unsigned k, BitWriter& writer) {
  size_t cleared = 0;   // from here to the next run
  size_t distance = 0;  // of the first of them
  const auto write_before = [&](size_t begin) {
    for (; cleared < begin; ++cleared) {
      writer.put_rice(distance, k);
      distance = 0;
    }
  };
  runs.visit([&](size_t begin, size_t end) {
    write_before(begin);
    distance = end - begin;
    cleared = end;
  });
  write_before(size);
}

void write_runs(const RunsOfMask& runs, unsigned k, unsigned k_runs, BitWriter& writer) {
  size_t next = 0;
  runs.visit([&](size_t begin, size_t end) {
    writer.put_rice(begin - next, k);
    writer.put_rice(end - begin - 1, k_runs);
    next = end + 1;
  });
}

// One past the last bit that is set, or with `flip` all ones, that is clear.
size_t end_of_bits(const UsageMask& mask, uint64_t flip) {
  for (size_t i = mask.words().size(); i > 0; --i) {
    const size_t bits = std::min<size_t>(64, mask.size() - 64 * (i - 1));
    const uint64_t word = (mask.words()[i - 1] ^ flip) & (~uint64_t{0} >> (64 - bits));
    if (word != 0) return 64 * i - static_cast<size_t>(std::countl_zero(word));
  }
  return 0;
}

// --- decoding

[[noreturn]] void refuse(const UsageMask& into, const std::string& expected_and_received) {
  throw std::invalid_argument("compressed mask of " + std::to_string(into.size()) + " units: expected " +
                              expected_and_received);
}

bool is_zero(uint64_t word) {
  return word == 0;
}

// Reads Rice codes; past the end stand zeros, as many as one likes.
class RiceReader {
 public:
  explicit RiceReader(std::span<const uint64_t> words) : words_(words), low_(word(0)), high_(word(1)) {}

  // False if the number is more than `most`. Reads no more than most / 2^k bits to find that out.
  bool read(unsigned k, uint64_t most, uint64_t& value) {
    uint64_t window = peek();
    uint64_t quotient = 0;
    while (window == 0) {
      quotient += 64;
      if (quotient > most >> k) return false;
      skip(64);
      window = peek();
    }
    const auto zeros = static_cast<unsigned>(std::countr_zero(window));
    quotient += zeros;
    if (quotient > most >> k) return false;
    uint64_t remainder = window >> zeros >> 1;
    if (zeros + 1 + k > 64) {
      skip(zeros + 1);
      remainder = peek();
      skip(k);
    } else {
      skip(zeros + 1 + k);
    }
    value = quotient << k | (remainder & ((uint64_t{1} << k) - 1));
    return value <= most;
  }

  // Whether all that was read was there, and nothing but zeros is left.
  bool is_at_end() const {
    if (64 * at_ + offset_ > 64 * words_.size()) return false;
    return low_ >> offset_ == 0 && (at_ >= words_.size() || std::ranges::all_of(words_.subspan(at_ + 1), is_zero));
  }

 private:
  uint64_t word(size_t index) const { return index < words_.size() ? words_[index] : 0; }
  uint64_t peek() const { return low_ >> offset_ | high_ << 1 << (63 - offset_); }
  void skip(unsigned bits) {
    offset_ += bits;
    if (offset_ < 64) return;
    offset_ -= 64;
    ++at_;
    low_ = high_;
    high_ = word(at_ + 1);
  }

  const std::span<const uint64_t> words_;
  size_t at_ = 0;  // the word of low_
  uint64_t low_, high_;
  unsigned offset_ = 0;  // into low_; less than 64
};

// Calls back with begin and end of what is set, in order. False where the codes are no mask.
template <typename Visit>
bool read_ranges(const CodecHeader& header, RiceReader reader, size_t size, const Visit& visit) {
  uint64_t next = 0, distance = 0, length = 0;
  for (uint64_t i = 0; i < header.count; ++i) {
    if (next >= size || !reader.read(header.k, size - 1 - next, distance)) return false;
    const uint64_t at = next + distance;
    switch (header.form) {
      case MaskForm::kSetBits:
        visit(at, at + 1);
        next = at + 1;
        break;
      case MaskForm::kClearedBits:
        if (distance > 0) visit(next, at);
        next = at + 1;
        break;
      default:
        if (!reader.read(header.k_runs, size - 1 - at, length)) return false;
        visit(at, at + length + 1);
        next = at + length + 2;
    }
  }
  if (header.form == MaskForm::kClearedBits && next < size) visit(next, size);
  return reader.is_at_end();
}

CodecHeader read_header(uint64_t word, const UsageMask& into) {
  CodecHeader header;
  header.form = static_cast<MaskForm>(word & 0xff);
  header.k = word >> 8 & 0xff;
  header.k_runs = word >> 16 & 0xff;
  header.count = word >> 24;
  const bool is_bitmap = header.form == MaskForm::kBitmap, is_runs = header.form == MaskForm::kRuns;
  const bool is_form =
      is_bitmap || is_runs || header.form == MaskForm::kSetBits || header.form == MaskForm::kClearedBits;
  if (!is_form || header.k > (is_bitmap ? 0 : CodecHeader::kMostK) ||
      header.k_runs > (is_runs ? CodecHeader::kMostK : 0) || header.count > (is_bitmap ? 0 : into.size())) {
    refuse(into, "the header of one of four forms, received " + std::to_string(word));
  }
  return header;
}

void merge_bitmap(std::span<const uint64_t> bits, UsageMask& into) {
  const size_t count = into.words().size();
  if (bits.size() < count) {
    refuse(into, std::to_string(count) + " words of bits, received " + std::to_string(bits.size()));
  }
  const size_t tail = into.size() % 64;
  if ((tail != 0 && bits[count - 1] >> tail != 0) || !std::ranges::all_of(bits.subspan(count), is_zero)) {
    refuse(into, "zeros past the last bit, received others");
  }
  into.merge(UsageMask(into.size(), std::vector<uint64_t>(bits.begin(), bits.begin() + count)));
}

}  // namespace

std::vector<uint64_t> compress(const UsageMask& mask) {
  const size_t size = mask.size();
  if (size > CodecHeader::kMostCount) return compress_to_bitmap(mask);
  const RunsOfMask runs(mask);
  const uint64_t set = runs.set_bits(), cleared = size - set;
  const uint64_t clear_between = end_of_bits(mask, 0) - set, set_between = end_of_bits(mask, ~uint64_t{0}) - cleared;
  const uint64_t known_clear = runs.count() > 0 ? runs.count() - 1 : 0;  // past each run but the last
  RiceSearch set_bits(set, clear_between), cleared_bits(cleared, set_between);
  RiceSearch distances(runs.count(), clear_between - known_clear), lengths(runs.count(), set - runs.count());

  const size_t bitmap_words = most_words(size);
  const bool try_set_bits = words_with(set_bits.least_bits()) < bitmap_words;
  const bool try_cleared_bits = words_with(cleared_bits.least_bits()) < bitmap_words;
  const bool try_runs = words_with(distances.least_bits() + lengths.least_bits()) < bitmap_words;
  for (bool known = !try_set_bits && !try_cleared_bits && !try_runs; !known;) {
    for (RiceSearch* search : {&set_bits, &cleared_bits, &distances, &lengths}) search->begin_walk();
    size_t next = 0;
    runs.visit([&](size_t begin, size_t end) {
      set_bits.add(begin - next);
      distances.add(begin - next - (next > 0 ? 1 : 0));
      lengths.add(end - begin - 1);
      if (end < size) cleared_bits.add(end - begin);
      next = end;
    });
    const bool set_known = set_bits.end_walk(), cleared_known = cleared_bits.end_walk();
    const bool distances_known = distances.end_walk(), lengths_known = lengths.end_walk();
    known = (set_known || !try_set_bits) && (cleared_known || !try_cleared_bits) &&
            ((distances_known && lengths_known) || !try_runs);
  }

  CodecHeader header;
  size_t least_words = bitmap_words;
  const auto consider = [&](bool tried, const CodecHeader& other, uint64_t bits) {
    if (!tried || words_with(bits) >= least_words) return;
    header = other;
    least_words = words_with(bits);
  };
  consider(try_set_bits, {MaskForm::kSetBits, set_bits.k(), 0, set}, set_bits.bits());
  consider(try_cleared_bits, {MaskForm::kClearedBits, cleared_bits.k(), 0, cleared}, cleared_bits.bits());
  consider(try_runs, {MaskForm::kRuns, distances.k(), lengths.k(), runs.count()}, distances.bits() + lengths.bits());
  if (header.form == MaskForm::kBitmap) return compress_to_bitmap(mask);

  std::vector<uint64_t> words(least_words);
  words[0] = header.word();
  BitWriter writer(words.data() + 1);
  switch (header.form) {
    case MaskForm::kSetBits:
      write_set_bits(runs, header.k, writer);
      break;
    case MaskForm::kClearedBits:
      write_cleared_bits(runs, size, header.k, writer);
      break;
    default:
      write_runs(runs, header.k, header.k_runs, writer);
  }
  writer.finish();
  return words;
}

void merge_compressed(std::span<const uint64_t> words, UsageMask& into) {
  if (words.empty()) refuse(into, "a header, received no words");
  const CodecHeader header = read_header(words[0], into);
  const std::span<const uint64_t> rest = words.subspan(1);
  if (header.form == MaskForm::kBitmap) {
    merge_bitmap(rest, into);
    return;
  }
  const auto check = [&](bool is_mask) {
    if (!is_mask) refuse(into, "as many codes as the header says, and then zeros; received others");
  };
  // Nothing may change before the last code has been read. A few ranges are remembered; more than take the memory of a
  // mask go into one.
  if (2 * (header.count + 1) <= into.words().size()) {
    std::vector<std::array<size_t, 2>> ranges;
    ranges.reserve(header.count + 1);
    check(read_ranges(header, RiceReader(rest), into.size(),
                      [&](size_t begin, size_t end) { ranges.push_back({begin, end}); }));
    for (const auto& [begin, end] : ranges) into.set_range(begin, end);
  } else {
    UsageMask received(into.size());
    check(read_ranges(header, RiceReader(rest), into.size(),
                      [&](size_t begin, size_t end) { received.set_range(begin, end); }));
    into.merge(received);
  }
}

size_t most_words(size_t size) {
  return 1 + UsageMask::word_count(size);
}

}  // namespace ddp_hooks
