// The XLA FFI handlers: they read buffers and attributes, share the work out and call the kernels.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "dense/attention.h"
#include "dense/experts.h"
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

// Further operands of a call, by their places; -1 is one that is not there.
struct Operands {
  ffi::RemainingArgs args;
  Ints matrices;

  std::optional<AnyBuffer> at(int64_t place) const {
    if (place < 0 || static_cast<size_t>(place) >= args.size()) return std::nullopt;
    return *args.get<AnyBuffer>(place);
  }
  const float* floats_at(int64_t place) const {
    const auto operand = at(place);
    return operand ? floats(*operand) : nullptr;
  }
  int64_t count() const { return records<MatrixDescriptor>(matrices).size(); }
  // The matrix at a place of the list, and its bias; false if it does not fit.
  template <class Out>
  bool read(int64_t place, Out* out) const {
    if (place < 0 || place >= count()) return false;
    const auto data = at(records<MatrixDescriptor>(matrices)[place].data);
    return data && read_matrix(matrices, place, *data, out);
  }
  bool read_biased(int64_t place, Description* out) const {
    if (!read(place, out)) return false;
    out->bias = floats_at(records<MatrixDescriptor>(matrices)[place].bias);
    return true;
  }
};

ffi::Error linear(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm, ffi::Buffer<ffi::F32> residual,
                  ffi::Buffer<ffi::S32> n_valid, ffi::RemainingArgs args, ffi::RemainingRets rets, Ints matrices,
                  int64_t act, float eps, int64_t zeros) {
  const int64_t cols = x.dimensions().back(), total = x.element_count() / std::max<int64_t>(cols, 1);
  const bool glu = act != 0;
  constexpr size_t kMost = 3;
  const Operands operands{args, matrices};
  const size_t count = operands.count();
  if (!count || count > kMost || (glu && count != 2) || rets.size() != (glu ? 1 : count))
    return ffi::Error::InvalidArgument("specsparse linear: one to three matrices, or two with an activation");
  Description weights[kMost];
  const Description* pointers[kMost];
  Output outs[kMost];
  bool quantise = false;
  for (size_t m = 0; m < count; ++m) {
    if (!operands.read_biased(m, &weights[m]) || weights[m].matrix.cols != cols ||
        (glu && weights[m].matrix.rows != weights[0].matrix.rows))
      return ffi::Error::InvalidArgument("specsparse linear: matrix " + std::to_string(m) + " does not fit");
    pointers[m] = &weights[m];
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

ffi::Error embed(ffi::AnyBuffer data, ffi::Buffer<ffi::S32> ids, ffi::ResultBuffer<ffi::F32> out, Ints matrices) {
  Description w;
  if (!read_matrix(matrices, 0, data, &w)) return ffi::Error::InvalidArgument("specsparse embed: matrix does not fit");
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

// The numbers of a result, all 0, or null if it is empty.
template <class Buffer>
float* zeroed(Buffer& to) {
  std::fill_n(to.typed_data(), to.element_count(), 0.0f);
  return to.element_count() ? to.typed_data() : nullptr;
}

// `values` is the cache of one layer's values, [batch, kv heads, capacity, d].
AttendShape attend_shape(const ffi::AnyBuffer& values, int64_t rows, int64_t width, const ffi::Buffer<ffi::F32>& cos,
                         const ffi::Buffer<ffi::F32>& sin, const ffi::Buffer<ffi::S32>& length,
                         const ffi::Buffer<ffi::S32>& n_valid, const ffi::Buffer<ffi::S32>& parents,
                         const ffi::Buffer<ffi::S32>& shift, bool neox) {
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
  s.shift = shift.element_count() ? shift.typed_data() : nullptr;
  const auto has = [](const auto& operand, int64_t count) { return static_cast<int64_t>(operand.element_count()) == count; };
  if (s.positions < s.capacity || s.n * s.batch != rows || !has(length, s.batch) || !has(n_valid, s.batch) ||
      (s.parents && !has(parents, rows)) || (s.shift && !has(shift, s.batch)) || 2 * s.rope > s.d || !has(sin, cos.element_count()))
    s.capacity = -1;  // does not fit
  return s;
}

// Norms of queries and keys, empty for none, and which table turns them; false if something does not fit.
bool attend_kind(const AttendShape& s, const std::optional<AnyBuffer>& q_norm, const std::optional<AnyBuffer>& k_norm,
                 int64_t window, int64_t table, float eps, AttendKind* out) {
  for (const auto* norm : {&q_norm, &k_norm})
    if (*norm && (*norm)->element_count() && static_cast<int64_t>((*norm)->element_count()) != s.d) return false;
  *out = {window, table, q_norm ? floats(*q_norm) : nullptr, k_norm ? floats(*k_norm) : nullptr, eps};
  return window >= 0 && table >= 0 && table < s.tables;
}

ffi::Error attend(ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v, ffi::AnyBuffer cache_k,
                  ffi::AnyBuffer cache_v, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> n_valid, ffi::Buffer<ffi::S32> parents,
                  ffi::Buffer<ffi::S32> shift, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm, ffi::ResultBuffer<ffi::F32> out,
                  ffi::Result<ffi::AnyBuffer> new_k, ffi::Result<ffi::AnyBuffer> new_v, ffi::ResultBuffer<ffi::F32> mass,
                  int64_t neox, int64_t window, int64_t table, float eps) {
  const int64_t rows = q.dimensions()[0], width = q.dimensions()[1];
  const AttendShape shape = attend_shape(cache_v, rows, width, cos, sin, length, n_valid, parents, shift, neox != 0);
  if (!shape.fits()) return ffi::Error::InvalidArgument("specsparse attend: head size and capacity must be multiples of 16");
  const int64_t own = rows * shape.kv_heads * shape.d;
  if (static_cast<int64_t>(k.element_count()) != own || v.element_count() != k.element_count() ||
      cache_k.size_bytes() != cache_v.size_bytes())
    return ffi::Error::InvalidArgument("specsparse attend: keys, values and caches do not go together");
  AttendKind kind;
  if (!attend_kind(shape, q_norm, k_norm, window, table, eps, &kind))
    return ffi::Error::InvalidArgument("specsparse attend: norms or table do not fit");
  thread_local AttendPlan plan;
  thread_local std::vector<float> rotated;
  plan.make(shape);
  rotated.resize(std::max<size_t>(rotated.size(), rows * width));
  if (static_cast<int64_t>(plan.rows().size()) < rows) std::fill_n(out->typed_data(), rows * width, 0.0f);
  const Attention layer{&plan, q.typed_data(), k.typed_data(), v.typed_data(), rotated.data(), out->typed_data(),
                        updated(cache_k, new_k), updated(cache_v, new_v), plan.rows().data(), kind, zeroed(*mass)};
  struct Job final : Phases {
    const Attention& layer;
    explicit Job(const Attention& layer) : layer(layer) {}
    int count() const override { return kAttendSteps; }
    int64_t items(int phase) const override { return layer.plan->items(phase); }
    void run(int phase, int64_t item) override { layer.run(phase, item); }
  } job(layer);
  run_phases(job);
  return ffi::Error::Success();
}

// How the FFNs of a call of `layers` are computed.
enum class Ffns : int64_t { kDense, kSkipping, kPredicted, kMasked };

// Whether a layer's matrices have the sizes that its phases read; `by_rows`: those of attention alone.
bool go_together(const LayerWeights& l, const AttendShape& s, int64_t width, bool by_rows) {
  const auto is = [&](LayerMatrix m, int64_t rows, int64_t cols) { return l.matrices[m].matrix.rows == rows && l.matrices[m].matrix.cols == cols; };
  const int64_t kv = s.kv_heads * s.d, hidden = by_rows ? 0 : l.matrices[kGate].matrix.rows;
  return is(kQ, s.heads * s.d, width) && is(kK, kv, width) && is(kV, kv, width) && is(kO, width, s.heads * s.d) &&
         (by_rows || (is(kGate, hidden, width) && is(kUp, hidden, width) && is(kDown, width, hidden)));
}

// The neurons' rows of a sparse FFN; false if the data do not hold them or they do not fit each other.
bool read_rows(const LayerDescriptor& d, const Operands& operands, NeuronDescription* rows, SparseFfn* out) {
  const bool gated = d.ffn_gate >= 0;
  if (!operands.read(d.ffn_up, &rows[0]) || !operands.read(d.ffn_down, &rows[1]) ||
      (gated && !operands.read(d.ffn_gate, &rows[2])))
    return false;
  const NeuronRows &up = rows[0].rows, &down = rows[1].rows;
  out->gate = gated ? &rows[2].rows : nullptr, out->up = up, out->down = down;
  return down.rows == up.rows && down.cols == up.cols && (!gated || (rows[2].rows.rows == up.rows && rows[2].rows.cols == up.cols));
}

// What a predictor reads of a layer, whose neurons `out` has already; false if the data do not hold it.
bool read_predicted(const LayerWeights& l, const LayerDescriptor& d, const Operands& operands, PredictedWeights* out) {
  const NeuronRows& up = out->ffn.up;
  const auto signs = operands.at(d.signs);
  const auto number = [&](int64_t place) { return place < 0 ? 0.0f : *operands.floats_at(place); };
  if (out->choice == Choice::kScores) out->first = &l.matrices[kFirst], out->second = &l.matrices[kSecond];
  if (out->choice == Choice::kSigns) out->signs = static_cast<const uint64_t*>(signs ? signs->untyped_data() : nullptr);
  out->norm = operands.floats_at(d.predictor_norm), out->threshold = number(d.threshold);
  out->ffn.norm = l.ffn_norm, out->ffn.least = number(d.least);
  const int64_t words = (up.cols + 63) / 64;
  const bool signs_fit = out->choice != Choice::kSigns || (signs && static_cast<int64_t>(signs->size_bytes()) == up.rows * words * 8);
  const bool scores_fit = !out->first || (out->first->matrix.cols == up.cols && out->second->matrix.cols == out->first->matrix.rows &&
                                          out->second->matrix.rows == up.rows);
  return l.matrices[kO].matrix.rows == up.cols && signs_fit && scores_fit;
}

// What zero skipping reads of `count` FFNs whose matrices are Q4_0, the first one's are given; false if the data do not hold it.
bool read_skip(const Description& gate_of, const Description& up_of, const Description& down_of, int64_t count,
               const std::optional<AnyBuffer>& up, const std::optional<AnyBuffer>& down, SkipWeights* out) {
  if (!up || !down) return false;
  for (const Description* d : {&gate_of, &up_of, &down_of}) {
    const Matrix& w = d->matrix;
    if (w.codes != Codes::kNibble || w.scales != Scales::kD || w.zero != kNibbleZero || w.lut || d->bias) return false;
  }
  const Matrix &gate = gate_of.matrix, &middle = up_of.matrix, &last = down_of.matrix;
  out->up = {static_cast<const uint8_t*>(up->untyped_data()), gate.rows, gate.cols, up->dimensions().back(), gate.codes,
             gate.scales, gate.sub, gate.zero, nullptr};
  out->down = {static_cast<const uint8_t*>(down->untyped_data()), last.cols / kBlock, (last.rows + kChunk - 1) / kChunk * kChunk};
  const int64_t inputs = gate.cols / kBlock;
  const int64_t row = out->up.chunks() * (kChunk / 2) + (inputs + 15) / 16 * 32;  // scales are read by sixteen
  return gate.rows == last.cols && middle.rows == gate.rows && middle.cols == gate.cols && last.rows == gate.cols &&
         out->up.row_bytes >= row && static_cast<int64_t>(up->size_bytes()) >= count * gate.rows * out->up.row_bytes &&
         static_cast<int64_t>(down->size_bytes()) >= count * out->down.count * out->down.block_bytes();
}

// Rows that do not count choose -1 everywhere.
ffi::Error choose(ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> n_valid, ffi::ResultBuffer<ffi::S32> experts,
                  ffi::ResultBuffer<ffi::F32> weights, int64_t gating, int64_t normalised) {
  const int64_t rows = logits.dimensions()[0], count = logits.dimensions().back(), ranks = experts->dimensions().back();
  if (ranks < 1 || ranks > count || weights->element_count() != experts->element_count() ||
      static_cast<int64_t>(experts->element_count()) != rows * ranks)
    return ffi::Error::InvalidArgument("specsparse choose: logits and choices do not go together");
  std::fill_n(experts->typed_data(), rows * ranks, -1);
  std::fill_n(weights->typed_data(), rows * ranks, 0.0f);
  for (int32_t r : valid_rows(n_valid, rows))
    choose_experts(logits.typed_data() + r * count, count, ranks, Gating(gating), normalised != 0,
                   experts->typed_data() + r * ranks, weights->typed_data() + r * ranks);
  return ffi::Error::Success();
}

// The matrices are gate, up and down of all experts.
ffi::Error experts(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> chosen, ffi::Buffer<ffi::F32> weights,
                   ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> y, Ints matrices, int64_t act,
                   int64_t up_rows, int64_t down_blocks) {
  const Operands operands{args, matrices};
  ExpertWeights w;
  w.act = Act(act), w.count = -1;
  Description* all[] = {&w.gate, &w.up, &w.down};
  for (int64_t m = 0; m < 3; ++m) {
    if (!operands.read_biased(m, all[m])) return ffi::Error::InvalidArgument("specsparse experts: a matrix does not fit");
    const MatrixDescriptor& d = records<MatrixDescriptor>(matrices)[m];
    const int64_t each = all[m]->matrix.groups() * d.bytes, bytes = operands.at(d.data)->size_bytes();
    if (w.count < 0) w.count = bytes / each;
    if (bytes != w.count * each || (all[m]->bias && static_cast<int64_t>(operands.at(d.bias)->element_count()) != w.count * d.rows))
      return ffi::Error::InvalidArgument("specsparse experts: matrices or biases of another number of experts");
  }
  const Matrix &gate = w.gate.matrix, &up = w.up.matrix, &down = w.down.matrix;
  const int64_t rows = x.dimensions()[0], ranks = chosen.dimensions().back();
  if (w.act == Act::kNone || gate.cols != x.dimensions().back() || up.cols != gate.cols || up.rows != gate.rows ||
      down.cols != gate.rows || down.rows != y->dimensions().back() ||
      static_cast<int64_t>(chosen.element_count()) != rows * ranks || weights.element_count() != chosen.element_count())
    return ffi::Error::InvalidArgument("specsparse experts: matrices, rows and choices do not go together");
  if (up_rows >= 0 && ((w.act != Act::kRelu && w.act != Act::kRelu2) ||
                       !read_skip(w.gate, w.up, w.down, w.count, operands.at(up_rows), operands.at(down_blocks), &w.skip)))
    return ffi::Error::InvalidArgument("specsparse experts: zeros are skipped of ReLU and Q4_0, without biases");
  run_experts(w, {rows, ranks, x.typed_data(), chosen.typed_data(), weights.typed_data(), y->typed_data()});
  return ffi::Error::Success();
}

ffi::Error layers(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> n_valid, ffi::Buffer<ffi::S32> parents,
                  ffi::Buffer<ffi::S32> shift, ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> out,
                  ffi::RemainingRets rets, Ints matrices, Ints descriptors, Ints features_of, int64_t ffns, int64_t act, int64_t up_act, float threshold,
                  float up_threshold, int64_t choice, int64_t relu, int64_t masses, float eps, int64_t neox) {
  const bool skip = Ffns(ffns) == Ffns::kSkipping, masked = Ffns(ffns) == Ffns::kMasked;
  const bool by_rows = Ffns(ffns) == Ffns::kPredicted, predicted = by_rows || masked;
  const Operands operands{args, matrices};
  const auto described = records<LayerDescriptor>(descriptors);
  const size_t count = described.size(), kept = features_of.size();
  if (skip && Act(act) != Act::kRelu && Act(act) != Act::kRelu2)
    return ffi::Error::InvalidArgument("specsparse layers: only ReLU and its square have zeros to skip");
  if (masked && (act < int64_t(Act::kSilu) || act > int64_t(Act::kRelu2) || up_act || Choice(choice) == Choice::kAll))
    return ffi::Error::InvalidArgument("specsparse layers: masks are a predictor's, for SiLU, ReLU and its square");
  const size_t mass_at = 2 * count + (skip ? 2 : predicted ? 4 : 0);
  if (!count || rets.size() != mass_at + (masses ? 1 : 0) + (kept ? 1 : 0))
    return ffi::Error::InvalidArgument("specsparse layers: results do not make up whole layers");
  std::vector<LayerWeights> all(count);
  std::vector<NeuronDescription> rows_of(by_rows ? 3 * count : 0);
  for (size_t i = 0; i < count; ++i) {
    const LayerDescriptor& d = described[i];
    LayerWeights& l = all[i];
    l.attn_norm = operands.floats_at(d.attn_norm), l.ffn_norm = operands.floats_at(d.ffn_norm);
    l.post_attention = operands.floats_at(d.post_attention_norm), l.post_ffn = operands.floats_at(d.post_ffw_norm);
    const int64_t own[kMatrices] = {d.attn_q, d.attn_k, d.attn_v, d.attn_output, by_rows ? -1 : d.ffn_gate,
                                    by_rows ? -1 : d.ffn_up, by_rows ? -1 : d.ffn_down, d.first, d.second};
    for (int64_t m = 0; m < kMatrices; ++m)
      if (own[m] >= 0 ? !operands.read_biased(own[m], &l.matrices[m]) : m <= kO || (m <= kDown && !by_rows))
        return ffi::Error::InvalidArgument("specsparse layers: a matrix of layer " + std::to_string(i) + " does not fit");
    auto keys = *rets.get<ffi::AnyBuffer>(2 * i), values = *rets.get<ffi::AnyBuffer>(2 * i + 1);
    l.keys = updated(*operands.at(d.keys), keys), l.values = updated(*operands.at(d.values), values);
    l.predicted.choice = Choice(choice), l.predicted.relu = relu != 0, l.predicted.ffn.eps = eps;
    l.predicted.ffn.act = {Activation::Kind(act), threshold}, l.predicted.ffn.up_act = {Activation::Kind(up_act), up_threshold};
    l.predicted.masked = masked;
    bool fits = !l.post_ffn || Ffns(ffns) == Ffns::kDense;
    if (skip || masked)
      fits = fits && read_skip(l.matrices[kGate], l.matrices[kUp], l.matrices[kDown], 1, operands.at(d.up_rows),
                               operands.at(d.down_blocks), &l.skip);
    if (masked && fits) {
      const auto gate = operands.at(d.gate_rows);
      l.skip.gate = l.predicted.ffn.up = l.skip.up, fits = gate && gate->size_bytes() == operands.at(d.up_rows)->size_bytes();
      if (fits) l.skip.gate.data = static_cast<const uint8_t*>(gate->untyped_data());
    }
    if (by_rows) fits = fits && read_rows(d, operands, &rows_of[3 * i], &l.predicted.ffn);
    if (!fits || (predicted && !read_predicted(l, d, operands, &l.predicted)))
      return ffi::Error::InvalidArgument("specsparse layers: the neurons of layer " + std::to_string(i) + " do not fit");
  }
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const AttendShape shape = attend_shape(*operands.at(described[0].values), rows, all[0].matrices[kQ].matrix.rows, cos, sin, length,
                                         n_valid, parents, shift, neox != 0);
  if (!shape.fits()) return ffi::Error::InvalidArgument("specsparse layers: head size and capacity must be multiples of 16");
  for (size_t i = 0; i < count; ++i) {
    const LayerDescriptor& d = described[i];
    const size_t bytes = operands.at(described[0].values)->size_bytes();
    if (operands.at(d.keys)->size_bytes() != bytes || operands.at(d.values)->size_bytes() != bytes ||
        !go_together(all[i], shape, width, by_rows))
      return ffi::Error::InvalidArgument("specsparse layers: the matrices or caches of layer " + std::to_string(i) + " do not go together");
    if (!attend_kind(shape, operands.at(d.attn_q_norm), operands.at(d.attn_k_norm), d.window, d.table, eps, &all[i].kind))
      return ffi::Error::InvalidArgument("specsparse layers: norms or table of layer " + std::to_string(i) + " do not fit");
  }
  if (masses) {
    float* to = zeroed(**rets.get<ffi::BufferR4<ffi::F32>>(mass_at));
    for (size_t i = 0; i < count; ++i) all[i].mass = to + i * shape.batch * shape.heads * (shape.capacity / 16);
  }
  thread_local Workspace work;
  work.plan.make(shape);
  const std::vector<int32_t>& valid = work.plan.rows();
  work.x.resize(std::max<size_t>(work.x.size(), rows * width));
  for (size_t r = 0; r < valid.size(); ++r) std::copy_n(x.typed_data() + valid[r] * width, width, &work.x[r * width]);
  thread_local std::vector<int32_t> found;
  std::vector<SkipCounts> counts;
  std::vector<SparseCounts> kept_counts;
  std::vector<int32_t> any_active(masked ? count : 0);
  if (predicted) {
    if (static_cast<int64_t>(valid.size()) > kSparseRows)
      return ffi::Error::InvalidArgument("specsparse layers: predicted FFNs take 64 rows at most");
    found.assign(2 * count * valid.size(), 0);
    for (size_t i = 0; i < count; ++i) {
      int32_t* own_counts = found.data() + 2 * i * valid.size();
      kept_counts.push_back({own_counts, own_counts + valid.size()});
      if (masked) counts.push_back({own_counts + valid.size(), &any_active[i]});
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
    features = {to->typed_data(), valid.data(), width, {features_of.begin(), features_of.end()}};
    if (static_cast<int64_t>(valid.size()) < rows) std::fill_n(features.data, to->element_count(), 0.0f);
  }
  run_layers(all, work, by_rows ? Act::kNone : Act(act), eps, counts, predicted ? &kept_counts : nullptr, features);
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
    for (size_t i = 0; i < count; ++i)
      any(1)[i] = kept_counts[i].read, any(3)[i] = masked ? any_active[i] : kept_counts[i].active;
  }
  if (static_cast<int64_t>(valid.size()) < rows) std::fill_n(out->typed_data(), rows * width, 0.0f);
  for (size_t r = 0; r < valid.size(); ++r) std::copy_n(&work.x[r * width], width, out->typed_data() + valid[r] * width);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_linear, linear,
                              (args<Floats, Floats, Floats, Ints32>().RemainingArgs().RemainingRets()
                                   .Attr<Ints>("matrices").Attr<int64_t>("act").Attr<float>("eps")
                                   .Attr<int64_t>("zeros")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_experts, experts,
                              (results<Floats>(args<Floats, Ints32, Floats>().RemainingArgs())
                                   .Attr<Ints>("matrices").Attr<int64_t>("act").Attr<int64_t>("up_rows")
                                   .Attr<int64_t>("down_blocks")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_choose, choose,
                              (results<Ints32, Floats>(args<Floats, Ints32>())
                                   .Attr<int64_t>("gating").Attr<int64_t>("normalised")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_add_normed, add_normed,
                              (results<Floats>(args<Floats, Floats, Floats, Ints32>()).Attr<float>("eps")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_embed, embed,
                              (results<Floats>(args<AnyBuffer, Ints32>()).Attr<Ints>("matrices")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_argmax, argmax, (results<Ints32>(args<Floats>())));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_attend, attend,
                              (results<Floats, AnyBuffer, AnyBuffer, Floats>(
                                   args<Floats, Floats, Floats, AnyBuffer, AnyBuffer, Floats, Floats, Ints32, Ints32, Ints32,
                                        Ints32, AnyBuffer, AnyBuffer>())
                                   .Attr<int64_t>("neox").Attr<int64_t>("window").Attr<int64_t>("table")
                                   .Attr<float>("eps")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_layers, layers,
                              (results<Floats>(args<Floats, Floats, Floats, Ints32, Ints32, Ints32, Ints32>().RemainingArgs())
                                   .RemainingRets()
                                   .Attr<Ints>("matrices").Attr<Ints>("layers").Attr<Ints>("features")
                                   .Attr<int64_t>("ffns").Attr<int64_t>("act").Attr<int64_t>("up_act")
                                   .Attr<float>("threshold").Attr<float>("up_threshold").Attr<int64_t>("choice")
                                   .Attr<int64_t>("relu").Attr<int64_t>("masses").Attr<float>("eps").Attr<int64_t>("neox")));

#pragma GCC visibility pop

}  // namespace specsparse

#define SPECSPARSE_EXPORT extern "C" __attribute__((visibility("default")))

SPECSPARSE_EXPORT int specsparse_version() { return specsparse::kDescriptorVersion; }
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
