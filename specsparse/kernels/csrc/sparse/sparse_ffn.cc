#include "sparse/sparse_ffn.h"

#include <numeric>

#include "simd/kinds.h"
#include "sparse/sparse_call.h"

namespace specsparse {
namespace {

constexpr int64_t kSumChunks = 8;  // added up together in the sum of sums
constexpr int64_t kFewSums = 1024;  // floats
constexpr int64_t kExpected = 4;    // of as many neurons one is kept, where it is not known yet

// One call: rows of activations and their neurons, and what they give.
class Call final : public SparseSteps {
 public:
  void begin(const SparseFfn& ffn, const int32_t* rows, int64_t count, SparseCounts* counts) override {
    call_.ffn = &ffn, call_.rows = rows, call_.count = count, counts_ = counts;
    call_.inputs.make(ffn, count);
    reserve(call_.parts, kSegments * count * call_.width()), reserve(call_.added, kSegments * count);
  }

  void prepare(const float* x, int64_t i) override { call_.inputs.prepare(x + call_.rows[i] * call_.ffn->up.cols, *call_.ffn, i); }

  void collect(const uint8_t* keep) override {
    call_.kept.count_kept(keep, call_.ffn->up.rows, call_.rows, call_.count, counts_->kept);
    call_.kept.list_kept();
    reserve(call_.active, call_.read());
    one_ = call_.count == 1 && threads() <= OneRow::kMostThreads, ranged_ = false;
    one_ ? one_row_.begin(call_, call_.read()) : several_rows_.begin(call_);
  }

  int64_t begin_ranges() override {
    const int64_t width = call_.ffn->up.rows;
    call_.kept.make(width), reserve(call_.active, width);
    one_ = ranged_ = true;
    one_row_.begin(call_, width / kExpected);
    return one_row_.items();
  }

  int64_t range_begin(int64_t range) const override { return call_.bound(one_row_.segment(range)); }

  void run_range(int64_t range, const uint8_t* keep) override {
    const int64_t first = range_begin(range);
    found_[range] = call_.kept.list(keep, first, range_begin(range + 1), first);
    one_row_.run(range, first, first + found_[range]);
  }

  int64_t hidden_items() const override { return one_ ? one_row_.items() : several_rows_.items(); }

  void hidden(int64_t item) override { one_ ? one_row_.run(item) : several_rows_.hidden(item); }

  void join(int64_t i) override {
    if (!one_) several_rows_.join(i);
    if (ranged_) {
      call_.kept.count = std::accumulate(found_, found_ + one_row_.items(), int64_t{0});
      counts_->kept[call_.rows[0]] = read();
    }
    int32_t nonzero = 0;
    for (int64_t segment = 0; segment < kSegments; ++segment) nonzero += call_.added[segment * call_.count + i];
    counts_->nonzero[call_.rows[i]] = nonzero;
  }

  int32_t read() const override { return static_cast<int32_t>(call_.read()); }

  int32_t active() const override {
    if (one_) return std::accumulate(call_.added.begin(), call_.added.begin() + kSegments, 0);
    return std::accumulate(call_.active.begin(), call_.active.begin() + read(), 0);
  }

  int64_t project_items() const override { return one_ || !call_.count ? 0 : kSegments; }

  void project(int64_t segment) override { several_rows_.project(segment); }

  int64_t sum_items() const override { return call_.count * sum_blocks(); }

  void sum(int64_t item, const float* residual, float* y) override {
    const int64_t blocks = sum_blocks(), t = item / blocks;
    const int64_t first = item % blocks * sum_chunks(), last = std::min(call_.ffn->down.chunks(), first + sum_chunks());
    for (int64_t c = first; c < last; c += kSumChunks) sum_segments(t, c, residual, y);
  }

  int32_t neuron(int64_t i) const { return call_.kept.neurons[i]; }  // of the union
  // Whether neuron i of the union is not zero in some row.
  bool active(int64_t i) const { return call_.active[i]; }

 private:
  // Few sums are one item: they take less time than another thread needs to hear of them.
  int64_t sum_chunks() const { return call_.count * call_.width() <= kFewSums ? call_.ffn->down.chunks() : kSumChunks; }
  int64_t sum_blocks() const { return (call_.ffn->down.chunks() + sum_chunks() - 1) / sum_chunks(); }

  // Columns of chunks [begin, begin + kSumChunks) of row t of y: the segments that have something, one after the other.
  void sum_segments(int64_t t, int64_t begin, const float* residual, float* y) {
    const NeuronRows& down = call_.ffn->down;
    const int64_t first = begin * kChunk, chunks = std::min(kSumChunks, down.chunks() - begin);
    const float* parts[kSegments];
    int count = 0;
    for (int64_t segment = 0; segment < kSegments; ++segment)
      if (call_.added[segment * call_.count + t]) parts[count++] = call_.part(segment, t) + first;
    float found[kSumChunks * kChunk];
    sparse_ops().sum_parts(down, parts, count, chunks, found);
    const int64_t at = call_.rows[t] * down.cols + first;
    for (int64_t c = 0; c < std::min(chunks * kChunk, down.cols - first); ++c)
      y[at + c] = residual ? residual[at + c] + found[c] : found[c];
  }

  SparseCall call_;
  SparseCounts* counts_;
  bool one_;               // of the two below, which
  bool ranged_;            // whether neurons are chosen range by range
  int64_t found_[kSegments];  // neurons of each range
  OneRow one_row_;
  SeveralRows several_rows_;
};

}  // namespace

bool SparseSteps::takes_ranges() { return threads() <= OneRow::kMostThreads; }

std::unique_ptr<SparseSteps> sparse_steps() { return std::make_unique<Call>(); }

void sparse_ffn(const SparseFfn& ffn, const float* x, const uint8_t* keep, const float* residual,
                const std::vector<int32_t>& rows, float* y, SparseCounts* counts) {
  thread_local Call own;
  Call& call = own;  // the other threads work on it, not on theirs
  thread_local std::vector<uint8_t> seen;
  const int64_t total = rows.size();
  if (total > kSparseRows) seen.assign(ffn.up.rows, 0);
  for (int64_t first = 0; first < total; first += kSparseRows) {
    const int64_t count = std::min(kSparseRows, total - first);
    call.begin(ffn, rows.data() + first, count, counts);
    parallel(count, [&](int64_t i) { call.prepare(x, i); });
    call.collect(keep);
    parallel(call.hidden_items(), [&](int64_t item) { call.hidden(item); });
    parallel(count, [&](int64_t i) { call.join(i); });
    parallel(call.project_items(), [&](int64_t segment) { call.project(segment); });
    parallel(call.sum_items(), [&](int64_t item) { call.sum(item, residual, y); });
    for (int64_t i = 0; i < call.read(); ++i) {
      uint8_t before = 0;
      if (total > kSparseRows) before = seen[call.neuron(i)], seen[call.neuron(i)] |= 1 | call.active(i) << 1;
      counts->read += !(before & 1), counts->active += call.active(i) && !(before & 2);
    }
  }
}

const SparseOps& sparse_ops() {
#if defined(__x86_64__)
  if (ops().registers == Registers::kAvx512) return kAvx512SparseOps;
  if (ops().registers == Registers::kAvx2) return kAvx2SparseOps;
#endif
  return kPortableSparseOps;
}

bool NeuronDescription::read(const MatrixDescriptor& d, const void* data, int64_t bytes) {
  rows = {static_cast<const uint8_t*>(data), d.rows, d.cols, d.bytes, Codes(d.codes), Scales(d.scales), d.sub,
          static_cast<int32_t>(d.zero), nullptr};
  bool has_lut = false;
  for (int i = 0; i < 16; ++i) lut[i] = static_cast<int8_t>(d.lut[i]), has_lut |= d.lut[i] != 0;
  if (has_lut) rows.lut = lut;
  const bool from_zero = rows.codes == Codes::kNibble && rows.scales == Scales::kD && !has_lut;  // the kernels know Q4_0 by that
  if (rows.zero != (from_zero ? kNibbleZero : 0)) return false;
  return has_kernels(rows) && bytes >= rows.rows * rows.row_bytes;
}

}  // namespace specsparse
