// Rotary embedding, cache append and attention of new rows, as work that is shared out item by item.
#pragma once

#include <cstdint>
#include <vector>

#include "simd/ops.h"

namespace specsparse {

// What all layers of one forward pass share.
struct AttendShape {
  int64_t batch, n, heads, kv_heads, d, capacity, rope;  // n: new rows of a sequence; rope: rotated pairs of a head
  int64_t tables, positions;  // of cos and sin
  KvType type;
  bool neox;
  const float* cos;  // [tables, positions, rope]
  const float* sin;
  const int32_t* length;   // [batch] committed tokens
  const int32_t* n_valid;  // [batch] new rows that count
  const int32_t* parents;  // [batch, n], or null for chains
  const int32_t* shift;    // [batch] what a row's slot is behind its position, or null

  bool fits() const { return d % (type == KvType::kQ8 ? 32 : 16) == 0 && capacity % 16 == 0 && kv_heads > 0 && heads % kv_heads == 0; }
  int64_t head_bytes() const { return capacity * (type == KvType::kQ8 ? d + d / 16 : d * (type == KvType::kF32 ? 4 : 2)); }
};

// Attention's steps: queries and keys are rotated and the cache appended to, then every tile's scores, weights and outputs.
enum AttendStep { kRotate, kScore, kSoften, kWeigh, kAttendSteps };

// Which rows there are, what each sees and how the work is cut. Reused from call to call.
class AttendPlan {
 public:
  void make(const AttendShape& shape);

  // The rows that count, as b * n + i.
  const std::vector<int32_t>& rows() const { return rows_; }
  int64_t items(int step) const;

 private:
  friend class Attention;
  struct Tile {
    int64_t b, g, first, count;  // `count` (row, head) pairs of one key/value head
    int64_t scores;              // where those of a cut tile begin
  };
  AttendShape shape_;
  std::vector<int32_t> rows_;
  std::vector<int64_t> counts_;
  // Of each sequence: the length up to which its cache was last asked to lie in huge pages, and the one to ask for now, or 0.
  std::vector<int64_t> gathered_, gather_;
  std::vector<std::vector<std::vector<int32_t>>> seen_;  // of trees: for each sequence and row the new slots it sees
  std::vector<std::vector<int32_t>> chains_;             // the new slots of each sequence
  std::vector<Tile> tiles_;
  int64_t parts_[kAttendSteps];  // of a tile in each step; where tiles are not cut they are whole in kScore
  bool cut_;
  std::vector<float> scores_;
};

// How one layer's attention differs from another's.
struct AttendKind {
  int64_t window = 0;             // positions that a row sees, its own among them; 0: all
  int64_t table = 0;              // of cos and sin
  const float* q_norm = nullptr;  // [d], RMS norm of each query before it is rotated, or null
  const float* k_norm = nullptr;  // and of each key
  float eps = 0.0f;
};

// One layer's attention. Row r of the plan reads row `at[r]` of q, k and v and writes that row of `out`.
struct Attention {
  AttendPlan* plan;
  const float *q, *k, *v;  // [., heads * d], [., kv_heads * d] twice
  float* rotated;          // as q
  float* out;              // as q
  void *keys, *values;     // the layer's cache
  const int32_t* at;       // null: row r of the plan is row r
  AttendKind kind = {};
  float* mass = nullptr;  // [batch, heads, capacity / 16] weights of each sequence's first row, summed by block of slots

  // All items of a step before any of the next.
  void run(int step, int64_t item) const;

 private:
  int64_t index(int64_t r) const { return at ? at[r] : r; }
  void rotate(int64_t item) const;
  void add_mass(const AttendPlan::Tile& tile, const AttendTile& t, int query) const;
  AttendTile describe(const AttendPlan::Tile& tile) const;
};

}  // namespace specsparse
