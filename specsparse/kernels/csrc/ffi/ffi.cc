// The XLA FFI handlers: they read buffers and attributes, share the work out and call the kernels.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "dense/attention.h"
#include "dense/layers.h"
#include "dense/linear.h"
#include "dense/unpack.h"
#include "ffi/bind.h"
#include "pool/pool.h"
#include "simd/amx.h"
#include "simd/trial.h"

namespace ffi = xla::ffi;

namespace specsparse {
namespace {

using ffi::Span;

bool read(Description* out, Ints all, int64_t index, const ffi::AnyBuffer& data) {
  if (static_cast<int64_t>(all.size()) < (index + 1) * kDescription) return false;
  return out->read(all.begin() + index * kDescription, data.untyped_data(), data.size_bytes());
}

const float* floats(const ffi::AnyBuffer& x) {
  return x.element_count() ? static_cast<const float*>(x.untyped_data()) : nullptr;
}

ffi::Error linear(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm, ffi::Buffer<ffi::F32> residual,
                  ffi::Buffer<ffi::S32> n_valid, ffi::RemainingArgs args, ffi::RemainingRets rets, Ints description,
                  int64_t act, float eps, int64_t zeros) {
  const int64_t cols = x.dimensions().back(), total = x.element_count() / std::max<int64_t>(cols, 1);
  const bool glu = act != 0;
  constexpr size_t kMost = 3;
  const size_t count = args.size() / 2;
  if (count > kMost || (glu && count != 2) || rets.size() != (glu ? 1 : count))
    return ffi::Error::InvalidArgument("specsparse linear: one to three matrices, or two with an activation");
  Description weights[kMost];
  const Description* pointers[kMost];
  Output outs[kMost];
  bool quantise = false;
  for (size_t m = 0; m < count; ++m) {
    auto data = args.get<ffi::AnyBuffer>(2 * m);
    auto bias = args.get<ffi::AnyBuffer>(2 * m + 1);
    if (!data || !bias || !read(&weights[m], description, m, *data) || weights[m].matrix.cols != cols)
      return ffi::Error::InvalidArgument("specsparse linear: matrix " + std::to_string(m) + " does not fit");
    pointers[m] = &weights[m];
    weights[m].bias = floats(*bias);
    quantise |= !weights[m].matrix.is_float();
    if (glu && m) continue;
    auto out = rets.get<ffi::AnyBuffer>(m);
    if (!out) return ffi::Error::InvalidArgument("specsparse linear: an output is missing");
    outs[m] = {static_cast<float*>((*out)->untyped_data()), glu ? nullptr : weights[m].bias,
               residual.element_count() ? residual.typed_data() : nullptr, weights[m].matrix.rows};
  }
  const std::vector<int32_t> rows = valid_rows(n_valid, total);
  if (zeros && static_cast<int64_t>(rows.size()) < total)
    for (size_t m = 0; m < rets.size(); ++m) std::fill_n(outs[m].data, total * outs[m].width, 0.0f);
  thread_local ActivationBuffer buffer;
  const Preparation prepare{x.typed_data(), norm.element_count() ? norm.typed_data() : nullptr, eps, quantise,
                            static_cast<int64_t>(rows.size()), rows.data(),
                            buffer.reserve(std::max<int64_t>(rows.size(), 1), cols, quantise)};
  const Product product(pointers, static_cast<int>(count), outs, prepare.to, rows.size(), rows.data(), Act(act));
  parallel(prepare.items(), [&](int64_t item) { prepare.run(item); }, product.items(), [&](int64_t item) { product.run(item); });
  return ffi::Error::Success();
}

// x + norm(y), zeros where a row does not count.
ffi::Error add_normed(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> y, ffi::Buffer<ffi::F32> norm,
                      ffi::Buffer<ffi::S32> n_valid, ffi::ResultBuffer<ffi::F32> out, float eps) {
  const int64_t cols = x.dimensions().back(), total = x.element_count() / std::max<int64_t>(cols, 1);
  if (y.element_count() != x.element_count() || static_cast<int64_t>(norm.element_count()) != cols)
    return ffi::Error::InvalidArgument("specsparse add_normed: rows or norm do not fit");
  const std::vector<int32_t> rows = valid_rows(n_valid, total);
  if (static_cast<int64_t>(rows.size()) < total) std::fill_n(out->typed_data(), total * cols, 0.0f);
  const NormedSum sum{x.typed_data(), y.typed_data(), norm.typed_data(), eps, cols, static_cast<int64_t>(rows.size()),
                      rows.data(), out->typed_data()};
  parallel(sum.items(), [&](int64_t item) { sum.run(item); });
  return ffi::Error::Success();
}

ffi::Error embed(ffi::AnyBuffer data, ffi::Buffer<ffi::S32> ids, ffi::ResultBuffer<ffi::F32> out, Ints description) {
  Description w;
  if (!read(&w, description, 0, data)) return ffi::Error::InvalidArgument("specsparse embed: matrix does not fit");
  for (size_t i = 0; i < ids.element_count(); ++i) {
    const int64_t row = std::clamp<int64_t>(ids.typed_data()[i], 0, w.matrix.rows - 1);
    unpack_row(w.matrix, row, out->typed_data() + i * w.matrix.cols);
  }
  return ffi::Error::Success();
}

// Lowest index of the largest value; NaN never wins.
ffi::Error argmax(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::S32> out) {
  const int64_t width = x.dimensions().back(), rows = out->element_count();
  parallel(rows, [&](int64_t row) {
    const float* p = x.typed_data() + row * width;
    constexpr int kChunk = 1024;
    float best = -INFINITY;
    int64_t at = 0;
    for (int64_t start = 0; start < width; start += kChunk) {
      const int64_t stop = std::min<int64_t>(width, start + kChunk);
      bool wild;
      const float top = ops().peak(p + start, stop - start, &wild);
      if (!(top > best)) continue;
      best = top;
      for (at = start; p[at] != best;) ++at;
    }
    out->typed_data()[row] = static_cast<int32_t>(at);
  });
  return ffi::Error::Success();
}

KvType kv_type(ffi::DataType type) {
  return type == ffi::F32 ? KvType::kF32 : type == ffi::F16 ? KvType::kF16 : type == ffi::S8 ? KvType::kQ8 : KvType::kBf16;
}

// The cache is updated in place where XLA gives one buffer for both, and copied first where it does not.
char* updated(const ffi::AnyBuffer& from, ffi::Result<ffi::AnyBuffer>& to) {
  char* out = static_cast<char*>(to->untyped_data());
  if (out != from.untyped_data()) std::copy_n(static_cast<const char*>(from.untyped_data()), from.size_bytes(), out);
  return out;
}

// `values` is the cache of one layer's values, [batch, kv heads, capacity, d].
AttendShape attend_shape(const ffi::AnyBuffer& values, int64_t rows, int64_t width, const ffi::Buffer<ffi::F32>& cos,
                         const ffi::Buffer<ffi::F32>& sin, const ffi::Buffer<ffi::S32>& length,
                         const ffi::Buffer<ffi::S32>& n_valid, const ffi::Buffer<ffi::S32>& parents, bool neox) {
  const auto dims = values.dimensions();
  AttendShape s;
  s.batch = dims[0], s.kv_heads = dims[1], s.capacity = dims[2];
  s.type = kv_type(values.element_type());
  s.d = s.type == KvType::kQ8 ? dims[3] / 17 * 16 : dims[3];  // a scale of two bytes for 32
  s.n = rows / std::max<int64_t>(s.batch, 1), s.heads = width / std::max<int64_t>(s.d, 1);
  s.tables = cos.dimensions()[0], s.positions = cos.dimensions()[1], s.rope = cos.dimensions()[2];
  s.neox = neox;
  s.cos = cos.typed_data(), s.sin = sin.typed_data(), s.length = length.typed_data(), s.n_valid = n_valid.typed_data();
  s.parents = parents.element_count() ? parents.typed_data() : nullptr;
  if (s.positions < s.capacity) s.capacity = -1;  // does not fit
  return s;
}

// Norms of queries and keys, empty for none, and which table turns them; false if something does not fit.
bool attend_kind(const AttendShape& s, const ffi::AnyBuffer& q_norm, const ffi::AnyBuffer& k_norm, int64_t window,
                 int64_t table, float eps, AttendKind* out) {
  for (const auto* norm : {&q_norm, &k_norm})
    if (norm->element_count() && static_cast<int64_t>(norm->element_count()) != s.d) return false;
  *out = {window, table, floats(q_norm), floats(k_norm), eps};
  return window >= 0 && table >= 0 && table < s.tables;
}

ffi::Error attend(ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v, ffi::AnyBuffer cache_k,
                  ffi::AnyBuffer cache_v, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> n_valid, ffi::Buffer<ffi::S32> parents,
                  ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm, ffi::ResultBuffer<ffi::F32> out,
                  ffi::Result<ffi::AnyBuffer> new_k, ffi::Result<ffi::AnyBuffer> new_v, int64_t neox, int64_t window,
                  int64_t table, float eps) {
  const int64_t rows = q.dimensions()[0], width = q.dimensions()[1];
  const AttendShape shape = attend_shape(cache_v, rows, width, cos, sin, length, n_valid, parents, neox != 0);
  if (!shape.fits()) return ffi::Error::InvalidArgument("specsparse attend: head size and capacity must be multiples of 16");
  AttendKind kind;
  if (!attend_kind(shape, q_norm, k_norm, window, table, eps, &kind))
    return ffi::Error::InvalidArgument("specsparse attend: norms or table do not fit");
  thread_local AttendPlan plan;
  thread_local std::vector<float> rotated;
  plan.make(shape);
  rotated.resize(std::max<size_t>(rotated.size(), rows * width));
  if (static_cast<int64_t>(plan.rows().size()) < rows) std::fill_n(out->typed_data(), rows * width, 0.0f);
  const Attention layer{&plan, q.typed_data(), k.typed_data(), v.typed_data(), rotated.data(), out->typed_data(),
                        updated(cache_k, new_k), updated(cache_v, new_v), plan.rows().data(), kind};
  parallel(plan.rotate_items(), [&](int64_t item) { layer.rotate(item); }, plan.tiles(), [&](int64_t item) { layer.tile(item); });
  return ffi::Error::Success();
}

// How the FFNs of a call of `layers` are computed.
enum class Ffns : int64_t { kDense, kSkipping, kPredicted };

// Operands of one layer: norms, matrices, their biases, the cache, and what its kind of FFN reads.
enum { kAttnNorm, kFfnNorm, kQNorm, kKNorm, kPostAttention, kPostFfn, kFirstMatrix };
enum { kUpRows, kDownStripes, kPerSkipping };
enum { kPredictedGate, kPredictedUp, kPredictedDown, kSigns, kThreshold, kLeast, kScoreNorm, kPerPredicted };

struct Operands {
  Ffns ffns;
  int64_t matrices;
  size_t bias() const { return kFirstMatrix + matrices; }
  size_t keys() const { return bias() + matrices; }
  size_t values() const { return keys() + 1; }
  size_t more() const { return values() + 1; }
  size_t each() const { return more() + (ffns == Ffns::kSkipping ? kPerSkipping : ffns == Ffns::kPredicted ? kPerPredicted : 0); }
};

// What all predicted layers of a call share, and the descriptions of their neurons: up, down and gate of each layer.
enum { kChoice, kRelu, kPredictedAct, kPredictedUpAct, kGated, kNeurons };

// What a predictor and a sparse FFN read of a layer; false if the data do not hold it. `rows` are of the layer's neurons.
template <class Operand>
bool read_predicted(LayerWeights& l, Ints neurons, size_t layer, Span<const float> thresholds, float eps, Operand more,
                    NeuronDescription* rows, PredictedWeights* out) {
  const bool gated = neurons[kGated] != 0;
  for (int m = 0; m < (gated ? 3 : 2); ++m) {
    static constexpr int kOperand[] = {kPredictedUp, kPredictedDown, kPredictedGate};
    const auto data = more(kOperand[m]);
    const size_t at = kNeurons + (layer * 3 + m) * kDescription;
    if (neurons.size() < at + kDescription || !rows[m].read(neurons.begin() + at, data.untyped_data(), data.size_bytes())) return false;
  }
  const NeuronRows &up = rows[0].rows, &down = rows[1].rows;
  out->choice = Choice(neurons[kChoice]), out->relu = neurons[kRelu] != 0;
  const auto signs = more(kSigns), threshold = more(kThreshold), least = more(kLeast);
  if (out->choice == Choice::kScores) out->first = &l.matrices[kFirst], out->second = &l.matrices[kSecond];
  if (out->choice == Choice::kSigns) out->signs = static_cast<const uint64_t*>(signs.untyped_data());
  out->norm = floats(more(kScoreNorm));
  out->threshold = threshold.element_count() ? *floats(threshold) : 0.0f;
  out->ffn = {gated ? &rows[2].rows : nullptr,
              up,
              down,
              l.ffn_norm,
              eps,
              {Activation::Kind(neurons[kPredictedAct]), thresholds[0]},
              {Activation::Kind(neurons[kPredictedUpAct]), thresholds[1]},
              least.element_count() ? *floats(least) : 0.0f};
  const int64_t words = (up.cols + 63) / 64;
  const bool signs_fit = !out->signs || static_cast<int64_t>(signs.size_bytes()) == up.rows * words * 8;
  const bool scores_fit = !out->first || (out->first->matrix.cols == up.cols && out->second->matrix.cols == out->first->matrix.rows &&
                                          out->second->matrix.rows == up.rows);
  const bool gate_fits = !gated || (rows[2].rows.rows == up.rows && rows[2].rows.cols == up.cols);
  return down.rows == up.rows && down.cols == up.cols && l.matrices[kO].matrix.rows == up.cols && signs_fit && scores_fit && gate_fits;
}

// What zero skipping reads of a layer whose matrices are Q4_0; false if the data do not hold it.
bool read_skip(const LayerWeights& l, const ffi::AnyBuffer& up, const ffi::AnyBuffer& down, SkipWeights* out) {
  const Matrix &gate = l.matrices[kGate].matrix, &last = l.matrices[kDown].matrix;
  for (int m : {kGate, kUp, kDown}) {
    const Matrix& w = l.matrices[m].matrix;
    if (w.codes != Codes::kNibble || w.scales != Scales::kD || w.zero != kNibbleZero || w.lut || l.matrices[m].bias) return false;
  }
  out->up = {static_cast<const uint8_t*>(up.untyped_data()), gate.rows, gate.cols, up.dimensions().back(), gate.codes,
             gate.scales, gate.sub, gate.zero, nullptr};
  out->down = static_cast<const uint8_t*>(down.untyped_data());
  const Matrix& middle = l.matrices[kUp].matrix;
  const int64_t stripes = (last.rows + kStripe - 1) / kStripe, blocks = last.cols / kBlock, inputs = gate.cols / kBlock;
  const int64_t row = out->up.chunks() * (kChunk / 2) + (inputs + 15) / 16 * 32;  // scales are read by sixteen
  return gate.rows == last.cols && middle.rows == gate.rows && middle.cols == gate.cols && last.rows == gate.cols &&
         out->up.row_bytes >= row && static_cast<int64_t>(up.size_bytes()) >= gate.rows * out->up.row_bytes &&
         static_cast<int64_t>(down.size_bytes()) >= stripes * blocks * kStripeBytes;
}

ffi::Error call_layers(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                       ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> n_valid, ffi::Buffer<ffi::S32> parents,
                       ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> out, ffi::RemainingRets rets, Ints description,
                       Ints kinds, int64_t act, float eps, int64_t neox, Ffns ffns, Ints neurons, Span<const float> thresholds) {
  const bool skip = ffns == Ffns::kSkipping, predicted = ffns == Ffns::kPredicted;
  if (predicted && (neurons.size() < kNeurons || thresholds.size() != 2))
    return ffi::Error::InvalidArgument("specsparse layers: the predictors are not described");
  const int64_t own = !predicted ? kMatrices : Choice(neurons[kChoice]) == Choice::kScores ? kSecond + 1 : kO + 1;
  const Operands at{ffns, own};
  const size_t each = at.each(), count = args.size() / each;
  if (skip && Act(act) != Act::kRelu && Act(act) != Act::kRelu2)
    return ffi::Error::InvalidArgument("specsparse layers: only ReLU and its square have zeros to skip");
  const size_t matrices = count * own * kDescription, kept = description.size() - std::min(matrices, description.size());
  if (!count || args.size() % each || rets.size() != 2 * count + (skip ? 2 : predicted ? 4 : 0) + (kept ? 1 : 0) || kinds.size() != 2 * count)
    return ffi::Error::InvalidArgument("specsparse layers: operands do not make up whole layers");
  std::vector<LayerWeights> all(count);
  std::vector<NeuronDescription> rows_of(predicted ? 3 * count : 0);
  for (size_t i = 0; i < count; ++i) {
    auto operand = [&](size_t which) { return *args.get<ffi::AnyBuffer>(i * each + which); };
    LayerWeights& l = all[i];
    l.attn_norm = floats(operand(kAttnNorm)), l.ffn_norm = floats(operand(kFfnNorm));
    for (int64_t m = 0; m < own; ++m) {
      if (!read(&l.matrices[m], description, i * own + m, operand(kFirstMatrix + m)))
        return ffi::Error::InvalidArgument("specsparse layers: a matrix of layer " + std::to_string(i) + " does not fit");
      l.matrices[m].bias = floats(operand(at.bias() + m));
    }
    auto keys = *rets.get<ffi::AnyBuffer>(2 * i), values = *rets.get<ffi::AnyBuffer>(2 * i + 1);
    l.keys = updated(operand(at.keys()), keys), l.values = updated(operand(at.values()), values);
    l.post_attention = floats(operand(kPostAttention)), l.post_ffn = floats(operand(kPostFfn));
    auto more = [&](size_t which) { return operand(at.more() + which); };
    if ((skip && (l.post_ffn || !read_skip(l, more(kUpRows), more(kDownStripes), &l.skip))) ||
        (predicted && (l.post_ffn || !read_predicted(l, neurons, i, thresholds, eps, more, &rows_of[3 * i], &l.predicted))))
      return ffi::Error::InvalidArgument("specsparse layers: the neurons of layer " + std::to_string(i) + " do not fit");
  }
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const AttendShape shape = attend_shape(*args.get<ffi::AnyBuffer>(at.values()), rows, all[0].matrices[kQ].matrix.rows, cos,
                                         sin, length, n_valid, parents, neox != 0);
  if (!shape.fits()) return ffi::Error::InvalidArgument("specsparse layers: head size and capacity must be multiples of 16");
  for (size_t i = 0; i < count; ++i) {
    auto norm = [&](size_t which) { return *args.get<ffi::AnyBuffer>(i * each + which); };
    if (!attend_kind(shape, norm(kQNorm), norm(kKNorm), kinds[2 * i], kinds[2 * i + 1], eps, &all[i].kind))
      return ffi::Error::InvalidArgument("specsparse layers: norms or table of layer " + std::to_string(i) + " do not fit");
  }
  thread_local Workspace work;
  work.plan.make(shape);
  const std::vector<int32_t>& valid = work.plan.rows();
  work.x.resize(std::max<size_t>(work.x.size(), rows * width));
  for (size_t r = 0; r < valid.size(); ++r) std::copy_n(x.typed_data() + valid[r] * width, width, &work.x[r * width]);
  thread_local std::vector<int32_t> found;
  std::vector<SkipCounts> counts;
  std::vector<SparseCounts> kept_counts;
  if (predicted) {
    if (static_cast<int64_t>(valid.size()) > kSparseRows)
      return ffi::Error::InvalidArgument("specsparse layers: predicted FFNs take 64 rows at most");
    found.assign(2 * count * valid.size(), 0);
    for (size_t i = 0; i < count; ++i) {
      int32_t* own_counts = found.data() + 2 * i * valid.size();
      kept_counts.push_back({own_counts, own_counts + valid.size()});
    }
  }
  if (skip) {
    int32_t* active = (*rets.get<ffi::BufferR1<ffi::S32>>(2 * count + 1))->typed_data();
    std::fill_n(active, count, 0);
    found.assign(count * valid.size(), 0);
    for (size_t i = 0; i < count; ++i) counts.push_back({found.data() + i * valid.size(), active + i});
  }
  Features features;
  if (kept) {
    auto to = *rets.get<ffi::BufferR2<ffi::F32>>(rets.size() - 1);
    if (to->dimensions()[0] != rows || to->dimensions()[1] != static_cast<int64_t>(kept) * width)
      return ffi::Error::InvalidArgument("specsparse layers: the rows that are kept do not fit");
    features = {to->typed_data(), valid.data(), width, {description.begin() + matrices, description.end()}};
    if (static_cast<int64_t>(valid.size()) < rows) std::fill_n(features.data, to->element_count(), 0.0f);
  }
  run_layers(all, work, Act(act), eps, counts, predicted ? &kept_counts : nullptr, features);
  // int32[count, rows] of result `which` after the caches: `of(layer)` of the rows that count, 0 of the others.
  auto spread = [&](size_t which, auto of) {
    int32_t* to = (*rets.get<ffi::BufferR2<ffi::S32>>(2 * count + which))->typed_data();
    std::fill_n(to, count * rows, 0);
    for (size_t i = 0; i < count; ++i)
      for (size_t r = 0; r < valid.size(); ++r) to[i * rows + valid[r]] = of(i)[r];
  };
  if (skip) spread(0, [&](size_t i) { return counts[i].nonzero; });
  if (predicted) {
    spread(0, [&](size_t i) { return kept_counts[i].kept; });
    spread(2, [&](size_t i) { return kept_counts[i].nonzero; });
    auto any = [&](size_t which) { return (*rets.get<ffi::BufferR1<ffi::S32>>(2 * count + which))->typed_data(); };
    for (size_t i = 0; i < count; ++i) any(1)[i] = kept_counts[i].read, any(3)[i] = kept_counts[i].active;
  }
  if (static_cast<int64_t>(valid.size()) < rows) std::fill_n(out->typed_data(), rows * width, 0.0f);
  for (size_t r = 0; r < valid.size(); ++r) std::copy_n(&work.x[r * width], width, out->typed_data() + valid[r] * width);
  return ffi::Error::Success();
}

ffi::Error layers(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> n_valid, ffi::Buffer<ffi::S32> parents,
                  ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> out, ffi::RemainingRets rets, Ints description,
                  Ints kinds, int64_t act, float eps, int64_t neox, int64_t skip) {
  return call_layers(x, cos, sin, length, n_valid, parents, args, out, rets, description, kinds, act, eps, neox,
                     skip ? Ffns::kSkipping : Ffns::kDense, {}, {});
}

ffi::Error predicted_layers(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                            ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> n_valid, ffi::Buffer<ffi::S32> parents,
                            ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> out, ffi::RemainingRets rets,
                            Ints description, Ints kinds, float eps, int64_t neox, Ints neurons, Span<const float> thresholds) {
  return call_layers(x, cos, sin, length, n_valid, parents, args, out, rets, description, kinds, 0, eps, neox,
                     Ffns::kPredicted, neurons, thresholds);
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_linear, linear,
                              (args<Floats, Floats, Floats, Ints32>().RemainingArgs().RemainingRets()
                                   .Attr<Ints>("description").Attr<int64_t>("act").Attr<float>("eps")
                                   .Attr<int64_t>("zeros")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_add_normed, add_normed,
                              (results<Floats>(args<Floats, Floats, Floats, Ints32>()).Attr<float>("eps")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_embed, embed,
                              (results<Floats>(args<AnyBuffer, Ints32>()).Attr<Ints>("description")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_argmax, argmax, (results<Ints32>(args<Floats>())));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_attend, attend,
                              (results<Floats, AnyBuffer, AnyBuffer>(
                                   args<Floats, Floats, Floats, AnyBuffer, AnyBuffer, Floats, Floats, Ints32, Ints32, Ints32,
                                        AnyBuffer, AnyBuffer>())
                                   .Attr<int64_t>("neox").Attr<int64_t>("window").Attr<int64_t>("table")
                                   .Attr<float>("eps")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_layers, layers,
                              (results<Floats>(args<Floats, Floats, Floats, Ints32, Ints32, Ints32>().RemainingArgs())
                                   .RemainingRets()
                                   .Attr<Ints>("description").Attr<Ints>("kinds").Attr<int64_t>("act")
                                   .Attr<float>("eps").Attr<int64_t>("neox").Attr<int64_t>("skip")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_predicted_layers, predicted_layers,
                              (results<Floats>(args<Floats, Floats, Floats, Ints32, Ints32, Ints32>().RemainingArgs())
                                   .RemainingRets()
                                   .Attr<Ints>("description").Attr<Ints>("kinds").Attr<float>("eps")
                                   .Attr<int64_t>("neox").Attr<Ints>("neurons")
                                   .Attr<Span<const float>>("thresholds")));

#pragma GCC visibility pop

}  // namespace specsparse

#define SPECSPARSE_EXPORT extern "C" __attribute__((visibility("default")))

SPECSPARSE_EXPORT void specsparse_set_threads(int count) { specsparse::set_threads(count); }
SPECSPARSE_EXPORT int specsparse_threads() { return specsparse::threads(); }
SPECSPARSE_EXPORT int specsparse_set_isa(const char* name) { return specsparse::set_ops(name); }
SPECSPARSE_EXPORT const char* specsparse_isa() { return specsparse::ops().name; }
// Adds a table from another library: for tests.
SPECSPARSE_EXPORT int specsparse_add_ops(void (*make)(const specsparse::Ops*, specsparse::Ops*)) { return specsparse::add_ops(make); }
// Why AMX is not used, or null.
SPECSPARSE_EXPORT const char* specsparse_why_no_amx() { return specsparse::why_no_amx(); }
// What a trial says of the table in use (0), of one that multiplies nothing (1) and of one that faults (2): for tests.
SPECSPARSE_EXPORT const char* specsparse_trial(int which) {
  using namespace specsparse;
  Ops tried = ops();
  if (which == 1) tried.dot = [](const Matrix&, int64_t, const Activations&, int64_t, int, float*) {};
  if (which == 2) tried.dot = [](const Matrix&, int64_t, const Activations&, int64_t, int, float*) { __builtin_trap(); };
  return fault_of(tried, kPortableOps);
}
