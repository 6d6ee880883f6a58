#include "dense/attention.h"

#include <algorithm>
#include <cmath>

#include "pool/pool.h"

namespace specsparse {
namespace {

constexpr int64_t kRowsPerItem = 4;  // of rotate

void rotate_head(float* x, const float* cos, const float* sin, int64_t pairs, bool neox) {
  for (int64_t i = 0; i < pairs; ++i) {
    float& a = x[neox ? i : 2 * i];
    float& b = x[neox ? i + pairs : 2 * i + 1];
    const float a0 = a, b0 = b;
    a = a0 * cos[i] - b0 * sin[i];
    b = a0 * sin[i] + b0 * cos[i];
  }
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
  int64_t vectors = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t start = std::max<int64_t>(s.length[b], 0);
    counts_[b] = std::clamp<int64_t>(s.n_valid[b], 0, std::min(s.n, std::max<int64_t>(s.capacity - start, 0)));
    if (s.parents) seen_[b] = tails(s.parents + b * s.n, s.n, counts_[b], start);
    for (int64_t i = 0; i < counts_[b]; ++i) rows_.push_back(static_cast<int32_t>(b * s.n + i));
    vectors += counts_[b] * s.heads;
  }
  // A tile is (row, head) pairs of one key/value head, which read its keys and values once; fewer where there would be too
  // few items.
  int64_t size = vectors > 2 * threads() ? 2 : 1;
  for (const int64_t larger : {4, 12, int{kMostQueries}})
    if (vectors / larger >= 4 * threads()) size = larger;
  const int64_t per_kv = s.heads / s.kv_heads;
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t g = 0; g < s.kv_heads; ++g)
      for (int64_t p = 0; p < counts_[b] * per_kv; p += size)
        tiles_.push_back({b, g, p, std::min(size, counts_[b] * per_kv - p)});
  std::reverse(tiles_.begin(), tiles_.end());  // the longest rows first
}

int64_t AttendPlan::rotate_items() const {
  return (static_cast<int64_t>(rows_.size()) + kRowsPerItem - 1) / kRowsPerItem;
}

void Attention::rotate(int64_t item) const {
  const AttendShape& s = plan->shape_;
  const Ops& op = ops();
  const int64_t width = s.heads * s.d, kv_width = s.kv_heads * s.d, head_bytes = s.head_bytes();
  const int64_t total = plan->rows_.size();
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.d));
  thread_local std::vector<float> key;
  key.resize(s.d);
  for (int64_t r = item * kRowsPerItem; r < std::min(total, (item + 1) * kRowsPerItem); ++r) {
    const int64_t b = plan->rows_[r] / s.n, i = plan->rows_[r] % s.n, row = index(r), slot = s.length[b] + i;
    const auto& seen = plan->seen_[b];
    const int64_t position = seen.empty() ? slot : s.length[b] + static_cast<int64_t>(seen[i].size()) - 1;
    const int64_t angle = (kind.table * s.positions + position) * s.rope;
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

void Attention::tile(int64_t item) const {
  const AttendShape& s = plan->shape_;
  const AttendPlan::Tile& tile = plan->tiles_[item];
  const int64_t per_kv = s.heads / s.kv_heads, width = s.heads * s.d;
  const int64_t start = s.length[tile.b], head = (tile.b * s.kv_heads + tile.g) * s.head_bytes();
  int64_t before = 0;  // rows of the plan in the sequences before this one
  for (int64_t b = 0; b < tile.b; ++b) before += plan->counts_[b];
  AttendTile t{};
  t.k = static_cast<const char*>(keys) + head, t.v = static_cast<const char*>(values) + head;
  t.type = s.type, t.d = s.d, t.queries = static_cast<int>(tile.count);
  const auto& seen = plan->seen_[tile.b];
  const bool tree = !seen.empty();
  t.shared = tree ? start : start + tile.first / per_kv + 1;  // a chain: what the tile's first row sees
  int32_t chain[kMostQueries];
  if (!tree)
    for (int64_t i = tile.first / per_kv + 1, c = 0; i <= (tile.first + tile.count - 1) / per_kv; ++i, ++c)
      chain[c] = static_cast<int32_t>(start + i);
  for (int64_t j = 0; j < tile.count; ++j) {
    const int64_t i = (tile.first + j) / per_kv, h = tile.g * per_kv + (tile.first + j) % per_kv;
    const int64_t from = index(before + i) * width + h * s.d;
    t.q[j] = rotated + from;
    t.out[j] = out + from;
    t.tail[j] = tree ? seen[i].data() : chain;
    t.tails[j] = tree ? static_cast<int64_t>(seen[i].size()) : i - tile.first / per_kv;
    t.first[j] = kind.window ? std::max<int64_t>(t.shared + t.tails[j] - kind.window, 0) : 0;
  }
  thread_local std::vector<float> scores;
  const int64_t needed = tile.count * (start + s.n + 48) + kAttendChunk * s.d;
  if (static_cast<int64_t>(scores.size()) < needed) scores.resize(needed);
  ops().attend(t, scores.data());
}

}  // namespace specsparse
