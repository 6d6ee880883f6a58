// Every phase of every layer is shared out by the pool, with nothing between.
#include "dense/layers.h"

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <optional>

#include "pool/pool.h"

namespace specsparse {
namespace {

enum { kPrepareAttention, kProjectQkv, kAttend, kPrepareOutput = kAttend + kAttendSteps, kProjectOutput, kAddAttention, kFfn };
enum { kPrepareFfn = kFfn, kGateUp, kCount, kPrepareDown, kProjectDown, kAddFfn, kStages };

class Forward final : public Phases {
 public:
  Forward(const std::vector<LayerWeights>& layers, Workspace& work, Act act, float eps,
          const std::vector<SkipCounts>& counts, const std::vector<SparseCounts>* predicted, const Features& features)
      : work_(work), features_(features), act_(act), eps_(eps), total_(work.plan.rows().size()), counted_(!counts.empty()),
        chosen_steps_(predicted ? PredictedFfn::kSteps : 0),
        stages_per_layer_((predicted && !counted_ ? int{kFfn} : int{kStages}) + chosen_steps_) {
    const int64_t rows = std::max<int64_t>(total_, 1);
    int64_t q = 0, kv = 0, inner = 0, cols = 0, added = 0;
    for (const LayerWeights& l : layers) {
      q = std::max(q, l.matrices[kQ].matrix.rows), kv = std::max(kv, l.matrices[kK].matrix.rows);
      inner = std::max(inner, l.matrices[kGate].matrix.rows);
      if (l.post_attention || l.post_ffn) added = l.matrices[kO].matrix.rows;
      for (const Description& m : l.matrices) cols = std::max(cols, m.matrix.cols);
      if (predicted) work.predicted.reserve(l.predicted, rows);
    }
    grow(work.q, rows * q), grow(work.rotated, rows * q), grow(work.attended, rows * q);
    grow(work.k, rows * kv), grow(work.v, rows * kv), grow(work.hidden, rows * inner);
    grow(work.added, rows * added);
    work.activations.reserve(rows, cols, true);
    for (size_t i = 0; i < layers.size(); ++i) {
      stages_.emplace_back(*this, layers[i]);
      if (predicted)
        stages_[i].predicted.emplace(layers[i].predicted, work.x.data(), total_, eps, work.activations, work.predicted,
                                     (*predicted)[i]);
      if (!predicted || counted_)
        stages_[i].ffn.emplace(*this, layers[i], counted_ ? counts[i] : SkipCounts{});
    }
  }

  int count() const override { return static_cast<int>(stages_.size()) * stages_per_layer_; }

  // After the run.
  const SparseCounts& counts(size_t layer) const { return stages_[layer].predicted->counts(); }

  int64_t items(int phase) const override {
    const Layer& l = stages_[phase / stages_per_layer_];
    const int stage = phase % stages_per_layer_;
    if (attends(stage)) return work_.plan.items(stage - kAttend);
    switch (stage) {
      case kPrepareAttention: return l.prepare_attention.items();
      case kProjectQkv: return l.qkv.items();
      case kProjectOutput: return l.output.items();
      case kPrepareOutput: return l.prepare_output.items();
      case kAddAttention: return l.add_attention.norm ? l.add_attention.items() : 0;
    }
    if (chooses(stage)) return l.predicted->items(stage - kFfn);
    const Ffn& f = *l.ffn;
    switch (stage - chosen_steps_) {
      case kAddFfn: return f.add_ffn.norm ? f.add_ffn.items() : 0;
      case kGateUp: return f.skips ? f.skip.hidden_items() : f.gate_up.items();
      case kCount: return !counted_ || (f.skips && total_ == 1) ? 0 : (f.width + f.counted - 1) / f.counted;
      case kProjectDown: return by_neuron(f) ? f.skip.output_items() : f.down.items();
      default: return f.prepare_ffn.items();
    }
  }

  void run(int phase, int64_t item) override {
    Layer& l = stages_[phase / stages_per_layer_];
    const int stage = phase % stages_per_layer_;
    if (attends(stage)) return l.attention.run(stage - kAttend, item);
    switch (stage) {
      case kPrepareAttention:
        keep(phase / stages_per_layer_, l.prepare_attention.step, item);
        return l.prepare_attention.run(item);
      case kProjectQkv: return l.qkv.run(item);
      case kPrepareOutput: return l.prepare_output.run(item);
      case kProjectOutput: return l.output.run(item);
      case kAddAttention: return l.add_attention.run(item);
    }
    if (chooses(stage)) {
      l.predicted->run(stage - kFfn, item);
      if (l.ffn && stage - kFfn == PredictedFfn::kCollect)
        l.ffn->skips = l.ffn->skip.choose(work_.predicted.kept, l.predicted->counts().kept);
      return;
    }
    const Ffn& f = *l.ffn;
    switch (stage - chosen_steps_) {
      case kPrepareFfn: return f.prepare_ffn.run(item);
      case kGateUp: return f.skips ? f.skip.hidden(item) : f.gate_up.run(item);
      case kCount: return f.count(work_.hidden.data(), l.predicted ? work_.predicted.keep.data() : nullptr, total_, item);
      case kPrepareDown: return f.prepare_down.run(item);
      case kProjectDown: return by_neuron(f) ? f.skip.output(item) : f.down.run(item);
      case kAddFfn: return f.add_ffn.run(item);
    }
  }

  // While other threads finish, the beginning of this thread's share of the next matrices comes from memory.
  void idle(int phase, int self, int threads) override {
    const size_t layer = phase / stages_per_layer_;
    const Layer& l = stages_[layer];
    const int stage = phase % stages_per_layer_;
    if (stage == kProjectQkv || (attends(stage) && stage > kAttend + kRotate)) return l.output.prefetch(kAhead, self, threads);
    const int last = l.ffn ? kProjectDown + chosen_steps_ : int{kFfn} + l.predicted->last();
    if (stage == last && layer + 1 < stages_.size()) return stages_[layer + 1].qkv.prefetch(kAhead, self, threads);
    if (stage == kProjectOutput && l.predicted) return l.predicted->prefetch(kAhead, self, threads);
    if (!l.ffn || chooses(stage)) return;
    const Ffn& f = *l.ffn;
    if (stage == kProjectOutput)
      return f.skips ? f.skip.prefetch(kAhead, share_begin(f.skip.hidden_items(), self, threads))
                     : f.gate_up.prefetch(kAhead, self, threads);
    if (stage - chosen_steps_ == kGateUp && !by_neuron(f)) f.down.prefetch(kAhead, self, threads);  // by the neurons counted so far
  }

 private:
  static constexpr int64_t kAhead = 16 << 10;
  static constexpr int64_t kCounted = 256;  // neurons of an item

  bool chooses(int stage) const { return stage >= kFfn && stage < kFfn + chosen_steps_; }
  static bool attends(int stage) { return stage >= kAttend && stage < kPrepareOutput; }

  // The rows of an item of the first phase, before anything is added to them.
  void keep(int64_t layer, int64_t step, int64_t item) const {
    features_.keep(layer, work_.x.data(), item * step, std::min(total_, (item + 1) * step));
  }

  static void grow(std::vector<float>& v, int64_t size) {
    if (static_cast<int64_t>(v.size()) < size) v.resize(size);
  }

  Preparation prepare(const float* from, const float* norm, std::initializer_list<const Description*> readers) {
    bool quantise = false;
    for (const Description* d : readers) quantise |= !d->matrix.is_float();
    return {from, norm, eps_, quantise, total_, nullptr,
            work_.activations.reserve(total_, (*readers.begin())->matrix.cols, quantise)};
  }

  Product product(std::initializer_list<const Description*> weights, std::initializer_list<float*> to, const Preparation& from,
                  const float* residual = nullptr, Act act = Act::kNone) {
    Output outs[3];
    for (size_t m = 0; m < to.size(); ++m) {
      const Description& w = *weights.begin()[m];
      outs[m] = {to.begin()[m], act == Act::kNone ? w.bias : nullptr, residual, w.matrix.rows};
    }
    return Product(weights.begin(), static_cast<int>(weights.size()), outs, from.to, total_, nullptr, act);
  }

  // The product that ends a block: added to the rows, or kept aside where it is normalised before.
  Product block_end(const Description& w, const Preparation& from, const float* post) {
    if (post) return product({&w}, {work_.added.data()}, from);
    return product({&w}, {work_.x.data()}, from, work_.x.data());
  }

  NormedSum sum(const float* post, int64_t width) {
    return {work_.x.data(), work_.added.data(), post, eps_, width, total_, nullptr, work_.x.data()};
  }

  struct Ffn {
    Preparation prepare_ffn;
    Product gate_up;
    Preparation prepare_down;
    Product down;
    NormedSum add_ffn;
    ZeroSkip skip;
    SkipCounts counts;
    int64_t width, counted;  // neurons; of an item that counts them
    bool skips;              // in this call, neuron by neuron

    // Neurons that rows do not keep are zero from here on.
    void count(float* hidden, const uint8_t* keep, int64_t rows, int64_t item) const {
      const int64_t begin = item * counted, end = std::min(width, begin + counted);
      count_neurons(hidden, skips ? nullptr : keep, width, rows, begin, end, counts);
    }

    Ffn(Forward& f, const LayerWeights& l, const SkipCounts& counts)
        : prepare_ffn(f.prepare(f.work_.x.data(), l.ffn_norm, {&l.matrices[kGate], &l.matrices[kUp]})),
          gate_up(f.product({&l.matrices[kGate], &l.matrices[kUp]}, {f.work_.hidden.data()}, prepare_ffn, nullptr, f.act_)),
          prepare_down(f.prepare(f.work_.hidden.data(), nullptr, {&l.matrices[kDown]})),
          down(f.block_end(l.matrices[kDown], prepare_down, l.post_ffn)),
          add_ffn(f.sum(l.post_ffn, l.matrices[kDown].matrix.rows)),
          skip(&l.matrices[kGate], &l.matrices[kUp], &l.skip, prepare_ffn.to, f.work_.hidden.data(), prepare_down.to,
               f.work_.x.data(), f.work_.x.data(), f.act_, counts, f.total_),
          counts(counts), width(l.matrices[kGate].matrix.rows), counted(f.total_ == 1 ? width : kCounted),
          skips(f.counted_ && f.total_ == 1 && !l.predicted.masked) {}
  };

  // Whether down reads single neurons.
  static bool by_neuron(const Ffn& f) { return f.skips && f.skip.few(); }

  struct Layer {
    Preparation prepare_attention;
    Product qkv;
    Attention attention;
    Preparation prepare_output;
    Product output;
    NormedSum add_attention;
    std::optional<Ffn> ffn;  // one of the two, or both: its neurons are chosen
    std::optional<PredictedFfn> predicted;

    Layer(Forward& f, const LayerWeights& l)
        : prepare_attention(f.prepare(f.work_.x.data(), l.attn_norm, {&l.matrices[kQ], &l.matrices[kK], &l.matrices[kV]})),
          qkv(f.product({&l.matrices[kQ], &l.matrices[kK], &l.matrices[kV]},
                        {f.work_.q.data(), f.work_.k.data(), f.work_.v.data()}, prepare_attention)),
          attention{&f.work_.plan,        f.work_.q.data(),        f.work_.k.data(), f.work_.v.data(),
                    f.work_.rotated.data(), f.work_.attended.data(), l.keys,           l.values,       nullptr,
                    l.kind,               l.mass},
          prepare_output(f.prepare(f.work_.attended.data(), nullptr, {&l.matrices[kO]})),
          output(f.block_end(l.matrices[kO], prepare_output, l.post_attention)),
          add_attention(f.sum(l.post_attention, l.matrices[kO].matrix.rows)) {}
  };

  Workspace& work_;
  const Features& features_;
  Act act_;
  float eps_;
  int64_t total_;
  bool counted_;  // neurons
  const int chosen_steps_;  // between attention and FFN
  const int stages_per_layer_;
  std::deque<Layer> stages_;  // stay where they are: a predicted FFN has an atomic
};

}  // namespace

void Features::keep(int64_t layer, const float* x, int64_t first, int64_t last) const {
  const int64_t count = layers.size();
  for (int64_t t = 0; t < count; ++t)
    if (layers[t] == layer)
      for (int64_t r = first; r < last; ++r) std::copy_n(x + r * width, width, data + (rows[r] * count + t) * width);
}

void run_layers(const std::vector<LayerWeights>& layers, Workspace& work, Act act, float eps,
                const std::vector<SkipCounts>& counts, std::vector<SparseCounts>* predicted, const Features& features) {
  Forward forward(layers, work, act, eps, counts, predicted, features);
  run_phases(forward);
  for (size_t i = 0; predicted && i < layers.size(); ++i) (*predicted)[i] = forward.counts(i);
  features.keep(layers.size(), work.x.data(), 0, work.plan.rows().size());
}

}  // namespace specsparse
