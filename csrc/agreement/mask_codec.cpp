#include "agreement/mask_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <string>

namespace ddp_hooks {
namespace {

enum class MaskForm : uint64_t { kBitmap = 1, kRuns = 2 };

// None is 0, so that a message which nobody wrote is no mask.
struct CodecHeader {
  MaskForm form = MaskForm::kBitmap;
  unsigned k_distances = 0;
  unsigned k_lengths = 0;
  uint64_t runs = 0;

  static constexpr unsigned kMostK = 40;
  static constexpr uint64_t kMostRuns = (uint64_t{1} << 40) - 1;

  uint64_t word() const {
    return static_cast<uint64_t>(form) | uint64_t{k_distances} << 8 | uint64_t{k_lengths} << 16 | runs << 24;
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
  // One past the last set bit. Bits above the size are zero, so a run has no end unless the size is that of the words.
  uint64_t end() const { return edge_count_ % 2 == 1 ? size_ : last_edge_; }

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
    last_edge_ = 64 * word + 63 - static_cast<size_t>(std::countl_zero(edges));
    if (!listed_) return;
    for (; edges != 0; edges &= edges - 1) edges_.push_back(64 * word + static_cast<size_t>(std::countr_zero(edges)));
  }

  const std::vector<uint64_t>& words_;
  const size_t size_;
  uint64_t set_bits_ = 0;
  uint64_t edge_count_ = 0;
  uint64_t last_edge_ = 0;
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

// `next` is the first bit that the next run can begin with: right after a run stands a bit that is clear.
void write_runs(const RunsOfMask& runs, const CodecHeader& header, BitWriter& writer) {
  size_t next = 0;
  runs.visit([&](size_t begin, size_t end) {
    writer.put_rice(begin - next, header.k_distances);
    writer.put_rice(end - begin - 1, header.k_lengths);
    next = end + 1;
  });
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
bool read_runs(const CodecHeader& header, RiceReader reader, size_t size, const Visit& visit) {
  uint64_t next = 0, distance = 0, length = 0;
  for (uint64_t i = 0; i < header.runs; ++i) {
    if (next >= size || !reader.read(header.k_distances, size - 1 - next, distance)) return false;
    const uint64_t begin = next + distance;
    if (!reader.read(header.k_lengths, size - 1 - begin, length)) return false;
    visit(begin, begin + length + 1);
    next = begin + length + 2;
  }
  return reader.is_at_end();
}

CodecHeader read_header(uint64_t word, const UsageMask& into) {
  CodecHeader header;
  header.form = static_cast<MaskForm>(word & 0xff);
  header.k_distances = word >> 8 & 0xff;
  header.k_lengths = word >> 16 & 0xff;
  header.runs = word >> 24;
  const bool is_runs = header.form == MaskForm::kRuns;
  const unsigned most_k = is_runs ? CodecHeader::kMostK : 0;
  if ((!is_runs && header.form != MaskForm::kBitmap) || header.k_distances > most_k || header.k_lengths > most_k ||
      header.runs > (is_runs ? into.size() : 0)) {
    refuse(into, "the header of one of two forms, received " + std::to_string(word));
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
    refuse(into, "zeros past the last bit, received ones");
  }
  into.merge(UsageMask(into.size(), std::vector<uint64_t>(bits.begin(), bits.begin() + count)));
}

}  // namespace

std::vector<uint64_t> compress(const UsageMask& mask) {
  const size_t size = mask.size();
  if (size > CodecHeader::kMostRuns) return compress_to_bitmap(mask);
  const RunsOfMask runs(mask);
  const uint64_t set = runs.set_bits(), count = runs.count();
  const uint64_t known_clear = count > 0 ? count - 1 : 0;  // past each run but the last
  RiceSearch distances(count, runs.end() - set - known_clear), lengths(count, set - count);

  const size_t bitmap_words = most_words(size);
  if (words_with(distances.least_bits() + lengths.least_bits()) >= bitmap_words) return compress_to_bitmap(mask);
  for (bool known = false; !known;) {
    distances.begin_walk();
    lengths.begin_walk();
    size_t next = 0;
    runs.visit([&](size_t begin, size_t end) {
      distances.add(begin - next);
      lengths.add(end - begin - 1);
      next = end + 1;
    });
    const bool distances_known = distances.end_walk(), lengths_known = lengths.end_walk();
    known = distances_known && lengths_known;
  }
  const size_t count_of_words = words_with(distances.bits() + lengths.bits());
  if (count_of_words >= bitmap_words) return compress_to_bitmap(mask);

  const CodecHeader header{MaskForm::kRuns, distances.k(), lengths.k(), count};
  std::vector<uint64_t> words(count_of_words);
  words[0] = header.word();
  BitWriter writer(words.data() + 1);
  write_runs(runs, header, writer);
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
    if (!is_mask) refuse(into, "as many codes as the header says, then zeros; received something else");
  };
  // Nothing may change before the last code has been read. A few runs are remembered; more than take the memory of a
  // mask go into one.
  if (2 * header.runs <= into.words().size()) {
    std::vector<std::array<size_t, 2>> runs;
    runs.reserve(header.runs);
    check(read_runs(header, RiceReader(rest), into.size(),
                    [&](size_t begin, size_t end) { runs.push_back({begin, end}); }));
    for (const auto& [begin, end] : runs) into.set_range(begin, end);
  } else {
    UsageMask received(into.size());
    check(read_runs(header, RiceReader(rest), into.size(),
                    [&](size_t begin, size_t end) { received.set_range(begin, end); }));
    into.merge(received);
  }
}

size_t most_words(size_t size) {
  return 1 + UsageMask::word_count(size);
}

}  // namespace ddp_hooks
