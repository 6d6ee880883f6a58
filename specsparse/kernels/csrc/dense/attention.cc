#include "dense/attention.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "pool/pool.h"

namespace specsparse {
namespace {

constexpr int64_t kRowsPerItem = 4;  // of rotate
constexpr int64_t kLongText = 2048;  // tokens from which on huge pages save more than they cost
constexpr int64_t kTileQueries = 24;  // of a tile that one thread computes
// From so many slots on, and up to so many scores, tiles are cut if a thread has fewer queries: two more steps cost less than
// reading twice, but another core's scores come late.
constexpr int64_t kCutSlots = 512, kCutQueries = 12, kCutScores = 32 << 20;

// Floats of the scores of a query that sees at most `slots`, and one more: seven cache lines more than a multiple of sixteen,
// since at other strides the lines of a tile's queries crowd into few sets of the first cache.
int64_t score_stride(int64_t slots) { return ((slots + 15) / 16 + 9) / 16 * 256 + 112; }

// The first cache line from p on: a vector in two lines is read twice.
float* aligned(float* p) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

void rotate_head(float* x, const float* cos, const float* sin, int64_t pairs, bool neox) {
  for (int64_t i = 0; i < pairs; ++i) {
    float& a = x[neox ? i : 2 * i];
    float& b = x[neox ? i + pairs : 2 * i + 1];
    const float a0 = a, b0 = b;
    a = a0 * cos[i] - b0 * sin[i];
    b = a0 * sin[i] + b0 * cos[i];
  }
}

// Asks for huge pages where these bytes lie, and for what shares them: each page of 4 KiB is a walk of the page table and ends
// a hardware prefetch. A system that has none to give leaves things as they are.
void gather_pages(void* from, int64_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, of Linux 6.1
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(from) + bytes + kHugePage - 1) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
}

// A head's elements, normalised where there is a norm.
void take_head(const float* from, const float* norm, float eps, int64_t d, float* to) {
  if (norm)
    ops().prepare(from, norm, eps, {d, 0, to, nullptr}, 0, false);
  else
    std::copy_n(from, d, to);
}

// For each new row, the new rows it sees (itself last), as slots in position order.
std::vector<std::vector<int32_t>> tails(const int32_t* parents, int64_t n, int64_t count, int64_t length) {
  std::vector<std::vector<int32_t>> out(n);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t parent = parents[i];
    if (parent >= 0 && parent < i) out[i] = out[parent];
    out[i].push_back(static_cast<int32_t>(length + i));
  }
  return out;
}

}  // namespace

void AttendPlan::make(const AttendShape& s) {
  shape_ = s;
  rows_.clear(), tiles_.clear();
  seen_.assign(s.batch, {});
  counts_.assign(s.batch, 0);
  chains_.resize(s.batch);
  int64_t vectors = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t start = std::max<int64_t>(s.length[b], 0);
    counts_[b] = std::clamp<int64_t>(s.n_valid[b], 0, std::min(s.n, std::max<int64_t>(s.capacity - start, 0)));
    if (s.parents) seen_[b] = tails(s.parents + b * s.n, s.n, counts_[b], start);
    chains_[b].resize(counts_[b]);
    std::iota(chains_[b].begin(), chains_[b].end(), static_cast<int32_t>(start));
    for (int64_t i = 0; i < counts_[b]; ++i) rows_.push_back(static_cast<int32_t>(b * s.n + i));
    vectors += counts_[b] * s.heads;
  }
  // A text that reaches 2,048 tokens, or a larger power of two, may become twice as long. Drafts that reach it and are
  // rejected ask once.
  gathered_.resize(s.batch), gather_.assign(s.batch, 0);
  for (int64_t b = 0; b < s.batch; ++b) {
    if (2 * s.length[b] < gathered_[b]) gathered_[b] = 0;
    for (int64_t length = kLongText; length <= s.length[b] + counts_[b]; length *= 2)
      if (s.length[b] < length && gathered_[b] < length) gather_[b] = length;
    gathered_[b] = std::max(gathered_[b], gather_[b]);
  }
  // A tile is (row, head) pairs of one key/value head, which read its keys and values once. Each thread has a share of all
  // pairs, one head after the other, so that few heads are read by two; many pairs are divided evenly. Over long sequences
  // threads share the tiles of a step of few rows, unless each has heads of its own.
  const int64_t per_kv = s.heads / s.kv_heads;
  int64_t total = 0, slots = 0, heads = 0;  // scores; of the longest sequence; key/value heads
  for (int64_t b = 0; b < s.batch; ++b) {
    total += counts_[b] * s.heads * score_stride(s.length[b] + s.n);
    if (counts_[b]) slots = std::max<int64_t>(slots, s.length[b]), heads += s.kv_heads;
  }
  cut_ = heads % threads() && slots >= kCutSlots && vectors < kCutQueries * threads() && total <= kCutScores;
  const bool many = vectors / kTileQueries >= 3 * threads();
  int64_t most = 0, scores = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t stride = score_stride(s.length[b] + s.n);
    for (int64_t g = 0; g < s.kv_heads; ++g)
      for (int64_t p = 0, all = counts_[b] * per_kv, size; p < all; p += size, scores += size * stride) {
        size = std::min(all - p, cut_ ? kMostQueries : kTileQueries);
        const int64_t share = total * (scores * threads() / total + 1) / threads();  // where the thread's ends
        if (!cut_ && !many) size = std::clamp<int64_t>((share - scores + stride - 1) / stride, 1, size);
        tiles_.push_back({b, g, p, size, scores});
        most = std::max(most, size);
      }
  }
  std::reverse(tiles_.begin(), tiles_.end());  // the longest rows first
  std::fill_n(parts_, kAttendSteps, cut_);
  parts_[kScore] = 1;
  if (!cut_) return;
  const int64_t count = tiles_.size();
  parts_[kScore] = std::max<int64_t>(threads(), (3 * threads() + count - 1) / count / threads() * threads()), parts_[kSoften] = most;
  while (parts_[kWeigh] * count < 2 * threads() && s.d % (32 * parts_[kWeigh]) == 0) parts_[kWeigh] *= 2;
  if (static_cast<int64_t>(scores_.size()) < scores + 16) scores_.resize(scores + 16);
}

int64_t AttendPlan::items(int step) const {
  if (step == kRotate) return (static_cast<int64_t>(rows_.size()) + kRowsPerItem - 1) / kRowsPerItem;
  return static_cast<int64_t>(tiles_.size()) * parts_[step];
}

void Attention::rotate(int64_t item) const {
  const AttendShape& s = plan->shape_;
  const Ops& op = ops();
  const int64_t width = s.heads * s.d, kv_width = s.kv_heads * s.d, head_bytes = s.head_bytes();
  const int64_t total = plan->rows_.size();
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.d));
  thread_local std::vector<float> key;
  key.resize(s.d);
  for (int64_t b = 0; item == 0 && b < s.batch; ++b)
    for (int64_t head = b * s.kv_heads; plan->gather_[b] && head < (b + 1) * s.kv_heads; ++head) {
      const int64_t bytes = head_bytes / s.capacity * std::min(2 * plan->gather_[b], s.capacity);
      for (void* from : {keys, values}) gather_pages(static_cast<char*>(from) + head * head_bytes, bytes);
    }
  for (int64_t r = item * kRowsPerItem; r < std::min(total, (item + 1) * kRowsPerItem); ++r) {
    const int64_t b = plan->rows_[r] / s.n, i = plan->rows_[r] % s.n, row = index(r), slot = s.length[b] + i;
    const auto& seen = plan->seen_[b];
    const int64_t position = seen.empty() ? slot : s.length[b] + static_cast<int64_t>(seen[i].size()) - 1;
    const int64_t turned = std::min(position + (s.shift ? s.shift[b] : 0), s.positions - 1);
    const int64_t angle = (kind.table * s.positions + turned) * s.rope;
    const float *cos = s.cos + angle, *sin = s.sin + angle;
    for (int64_t g = 0; g < s.kv_heads; ++g) {
      take_head(k + row * kv_width + g * s.d, kind.k_norm, kind.eps, s.d, key.data());
      rotate_head(key.data(), cos, sin, s.rope, s.neox);
      const int64_t head = (b * s.kv_heads + g) * head_bytes;
      op.store_kv(key.data(), v + row * kv_width + g * s.d, s.d, slot, s.type, static_cast<char*>(keys) + head,
                  static_cast<char*>(values) + head);
    }
    for (int64_t h = 0; h < s.heads; ++h) {
      float* to = rotated + row * width + h * s.d;
      take_head(q + row * width + h * s.d, kind.q_norm, kind.eps, s.d, to);
      rotate_head(to, cos, sin, s.rope, s.neox);
      for (int64_t j = 0; j < s.d; ++j) to[j] *= scale;
    }
  }
}

AttendTile Attention::describe(const AttendPlan::Tile& tile) const {
  const AttendShape& s = plan->shape_;
  const int64_t per_kv = s.heads / s.kv_heads, width = s.heads * s.d;
  const int64_t start = s.length[tile.b], head = (tile.b * s.kv_heads + tile.g) * s.head_bytes();
  int64_t before = 0;  // rows of the plan in the sequences before this one
  for (int64_t b = 0; b < tile.b; ++b) before += plan->counts_[b];
  AttendTile t;
  t.k = static_cast<const char*>(keys) + head, t.v = static_cast<const char*>(values) + head;
  t.type = s.type, t.d = s.d, t.queries = static_cast<int>(tile.count);
  const auto& seen = plan->seen_[tile.b];
  const bool tree = !seen.empty();
  const int64_t row = tile.first / per_kv;
  t.shared = tree ? start : start + row + 1;  // a chain: what the tile's first row sees
  t.common = 0;
  int64_t last = t.shared, first = t.shared;
  for (int j = 0; j < t.queries; ++j) {
    const int64_t i = (tile.first + j) / per_kv, h = tile.g * per_kv + (tile.first + j) % per_kv;
    const int64_t from = index(before + i) * width + h * s.d;
    t.q[j] = rotated + from;
    t.out[j] = out + from;
    t.tail[j] = tree ? seen[i].data() : plan->chains_[tile.b].data() + row + 1;
    t.tails[j] = tree ? static_cast<int64_t>(seen[i].size()) : i - row;
    t.first[j] = kind.window ? std::max<int64_t>(t.shared + t.tails[j] - kind.window, 0) : 0;
    if (t.tails[j]) last = std::max<int64_t>(last, t.tail[j][t.tails[j] - 1] + 1);
    first = std::min(first, t.first[j]);
    t.common = std::max(t.common, std::min(t.first[j], t.shared));
  }
  t.block = first / 16, t.stop = (last + 15) / 16;
  t.stride = score_stride(start + s.n);
  return t;
}

// After the query's weights are known. The first row is the root of a draft: whatever becomes of the draft, it stays.
void Attention::add_mass(const AttendPlan::Tile& tile, const AttendTile& t, int query) const {
  const AttendShape& s = plan->shape_;
  const int64_t per_kv = s.heads / s.kv_heads, pair = tile.first + query;
  if (!mass || pair >= per_kv) return;
  float* to = mass + (tile.b * s.heads + tile.g * per_kv + pair) * (s.capacity / 16);
  const float *weights = t.scores + query * t.stride, share = weights[t.stride - 1];
  for (int64_t block = t.first[query] / 16; block * 16 < t.shared + t.tails[query]; ++block) {
    float sums[4] = {};
    for (int i = 0; i < 16; ++i) sums[i % 4] += weights[block * 16 + i];
    to[block] = (sums[0] + sums[1] + (sums[2] + sums[3])) * share;
  }
}

void Attention::run(int step, int64_t item) const {
  if (step == kRotate) return rotate(item);
  const Ops& op = ops();
  const int64_t parts = plan->parts_[step], part = item % parts;
  const AttendPlan::Tile& tile = plan->tiles_[item / parts];
  if (step == kSoften && part >= tile.count) return;
  AttendTile t = describe(tile);
  thread_local std::vector<float> own;
  const int64_t copy = kAttendChunk * t.d, needed = copy + (plan->cut_ ? 0 : t.queries * t.stride) + 16;
  if (static_cast<int64_t>(own.size()) < needed) own.resize(needed);
  t.copy = aligned(own.data());
  t.scores = plan->cut_ ? aligned(plan->scores_.data()) + tile.scores : t.copy + copy;
  if (!plan->cut_) {
    op.score(t, t.block, t.stop);
    for (int j = 0; j < t.queries; ++j) op.soften(t, j), add_mass(tile, t, j);
    return op.weigh(t, 0, t.d);
  }
  const int64_t blocks = t.stop - t.block, columns = t.d / parts;
  switch (step) {
    case kScore: return op.score(t, t.block + blocks * part / parts, t.block + blocks * (part + 1) / parts);
    case kSoften: return op.soften(t, static_cast<int>(part)), add_mass(tile, t, static_cast<int>(part));
    case kWeigh: return op.weigh(t, part * columns, (part + 1) * columns);
  }
}

}  // namespace specsparse
