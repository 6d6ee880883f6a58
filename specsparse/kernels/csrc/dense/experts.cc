#include "dense/experts.h"

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <optional>

#include "pool/pool.h"

namespace specsparse {
namespace {

// A pair is a row and one of its ranks. Pairs are in the order of the experts, so that the rows of an expert are neighbours.
struct Work {
  std::vector<int64_t> begin, place;  // first pair of each expert; pair of each (row, rank), or -1
  std::vector<int64_t> row;           // of each pair
  std::vector<float> hidden, out;     // of each pair
  ActivationBuffer x, h;
  int32_t counted[2];  // what skipping sees and nobody asks for
};

Product product(std::initializer_list<const Description*> weights, float* to, const float* bias, const Activations& x,
                int64_t rows, Act act) {
  const Output out{to, bias, nullptr, weights.begin()[0]->matrix.rows};
  return Product(weights.begin(), static_cast<int>(weights.size()), &out, x, rows, nullptr, act);
}

// An expert that some row chose.
struct Woken {
  Description gate, up, down;
  int64_t first;  // of its pairs
  Activations x, h;
  Product gate_up, project;
  SkipWeights neurons;
  std::optional<ZeroSkip> skip;  // in place of the products

  Woken(const ExpertWeights& w, int64_t expert, int64_t first, int64_t rows, const Activations& x, const Activations& h,
        float* hidden, float* out, int32_t* counted)
      : gate(w.gate, expert), up(w.up, expert), down(w.down, expert), first(first), x(x), h(h),
        gate_up(product({&gate, &up}, hidden, nullptr, x, rows, w.act)),
        project(product({&down}, out, down.bias, h, rows, Act::kNone)), neurons(w.skip) {
    if (!neurons.down.data || rows > 1) return;
    neurons.up.data += expert * neurons.up.rows * neurons.up.row_bytes;
    neurons.down.data += expert * neurons.down.count * neurons.down.block_bytes();
    skip.emplace(&gate, &up, &neurons, x, hidden, h, nullptr, out, w.act, SkipCounts{counted, counted + 1});
  }

  int64_t hidden_items() const { return skip ? skip->hidden_items() : gate_up.items(); }
  int64_t output_items() const { return skip ? skip->output_items() : project.items(); }
  void run_hidden(int64_t item) const { skip ? skip->hidden(item) : gate_up.run(item); }
  void run_output(int64_t item) const { skip ? skip->output(item) : project.run(item); }
  void prefetch_hidden(int64_t bytes, int64_t item) const { skip ? skip->prefetch(bytes, item) : gate_up.prefetch(bytes, item); }
};

class Forward final : public Phases {
 public:
  Forward(const ExpertWeights& w, const ExpertRows& rows, Work& work)
      : rows_(rows), work_(work), cols_(w.gate.matrix.cols), width_(w.down.matrix.rows),
        quantise_x_(!w.gate.matrix.is_float() || !w.up.matrix.is_float()), quantise_h_(!w.down.matrix.is_float()) {
    sort(w.count);
    const int64_t pairs = work.begin[w.count], inner = w.down.matrix.cols;
    int64_t whole = 0;  // rows of whole tiles
    for (int64_t e = 0; e < w.count; ++e) whole += whole_tiles(work.begin[e + 1] - work.begin[e]);
    Activations x = work.x.reserve(whole, cols_, quantise_x_), h = work.h.reserve(whole, inner, quantise_h_);
    grow(work.hidden, pairs * inner), grow(work.out, pairs * width_);
    for (int64_t e = 0; e < w.count; ++e) {
      const int64_t first = work.begin[e], count = work.begin[e + 1] - first;
      if (!count) continue;
      x.tile = h.tile = tile_of(count);
      woken_.emplace_back(w, e, first, count, x, h, work.hidden.data() + first * inner, work.out.data() + first * width_,
                          work.counted);
      for (Activations* a : {&x, &h}) a->x += count * a->cols, a->q += whole_tiles(count) * a->blocks;
      pairs_.push_back(first + count);
      gate_up_.push_back(gate_up_.back() + woken_.back().hidden_items());
      project_.push_back(project_.back() + woken_.back().output_items());
    }
    pair_step_ = preparation_step(pairs), row_step_ = preparation_step(rows.rows);
  }

  int count() const override { return kPhases; }

  int64_t items(int phase) const override {
    switch (phase) {
      case kGateUp: return gate_up_.back();
      case kProject: return project_.back();
      case kSum: return (rows_.rows + row_step_ - 1) / row_step_;
      default: return (pairs_.back() + pair_step_ - 1) / pair_step_;
    }
  }

  void run(int phase, int64_t item) override {
    if (phase == kGateUp || phase == kProject) {
      const std::vector<int64_t>& ends = phase == kGateUp ? gate_up_ : project_;
      const size_t i = find(ends, item);
      return phase == kGateUp ? woken_[i].run_hidden(item - ends[i]) : woken_[i].run_output(item - ends[i]);
    }
    if (phase == kSum) {
      for (int64_t r = item * row_step_; r < std::min(rows_.rows, (item + 1) * row_step_); ++r) sum(r);
      return;
    }
    for (int64_t p = item * pair_step_; p < std::min(pairs_.back(), (item + 1) * pair_step_); ++p) {
      const Woken& e = woken_[find(pairs_, p)];
      if (phase == kPrepare)
        ops().prepare(rows_.x + work_.row[p] * cols_, nullptr, 0.0f, e.x, p - e.first, quantise_x_);
      else
        ops().prepare(work_.hidden.data() + p * e.h.cols, nullptr, 0.0f, e.h, p - e.first, quantise_h_);
    }
  }

  // While other threads finish, the beginning of this thread's share of the next matrices comes from memory.
  void idle(int phase, int self, int threads) override {
    const std::vector<int64_t>& ends = phase == kPrepare ? gate_up_ : project_;
    if (phase > kGateUp || !ends.back()) return;
    const int64_t item = share_begin(ends.back(), self, threads);
    const size_t i = find(ends, item);
    if (phase == kPrepare)
      woken_[i].prefetch_hidden(kAhead, item - ends[i]);
    else if (!woken_[i].skip)
      woken_[i].project.prefetch(kAhead, item - ends[i]);
  }

 private:
  enum { kPrepare, kGateUp, kPrepareHidden, kProject, kSum, kPhases };
  static constexpr int64_t kAhead = 16 << 10;

  static void grow(std::vector<float>& v, int64_t size) {
    if (static_cast<int64_t>(v.size()) < size) v.resize(size);
  }
  static int64_t whole_tiles(int64_t rows) { return (rows + tile_of(rows) - 1) / tile_of(rows) * tile_of(rows); }
  // The expert that has an item; ends[i] is where those of expert i begin.
  static size_t find(const std::vector<int64_t>& ends, int64_t item) {
    return std::upper_bound(ends.begin(), ends.end(), item) - ends.begin() - 1;
  }

  // The pairs, sorted by expert.
  void sort(int64_t experts) {
    const int64_t all = rows_.rows * rows_.ranks;
    const auto known = [&](int64_t i) { return rows_.chosen[i] >= 0 && rows_.chosen[i] < experts; };
    work_.begin.assign(experts + 2, 0), work_.place.assign(all, -1), work_.row.resize(all);
    int64_t* next = work_.begin.data() + 1;  // where an expert's next pair goes; in the end where the following one begins
    for (int64_t i = 0; i < all; ++i)
      if (known(i)) ++next[rows_.chosen[i] + 1];
    for (int64_t e = 1; e <= experts; ++e) next[e] += next[e - 1];
    for (int64_t i = 0; i < all; ++i)
      if (known(i)) work_.row[work_.place[i] = next[rows_.chosen[i]]++] = i / rows_.ranks;
  }

  void sum(int64_t r) const {
    float* to = rows_.y + r * width_;
    bool any = false;
    for (int64_t i = r * rows_.ranks; i < (r + 1) * rows_.ranks; ++i) {
      if (work_.place[i] < 0) continue;
      const float* from = work_.out.data() + work_.place[i] * width_;
      const float weight = rows_.weights[i];
      if (any)
        for (int64_t c = 0; c < width_; ++c) to[c] = to[c] + weight * from[c];
      else
        for (int64_t c = 0; c < width_; ++c) to[c] = weight * from[c];
      any = true;
    }
    if (!any) std::fill_n(to, width_, 0.0f);
  }

  const ExpertRows& rows_;
  Work& work_;
  int64_t cols_, width_, pair_step_, row_step_;
  bool quantise_x_, quantise_h_;
  std::deque<Woken> woken_;  // stay where they are: products point into them
  std::vector<int64_t> pairs_{0}, gate_up_{0}, project_{0};  // where those of each woken expert begin
};

constexpr float kLeastSum = 0x1p-14f;  // float16's least normal number

// x <- exp((x - top) / temperature), of any number of values.
void exponentials(std::vector<float>& x, float top, float temperature) {
  const size_t count = x.size();
  x.resize((count + 15) / 16 * 16, top);
  ops().exp_shifted(x.data(), x.size(), top, temperature, x.data());
  x.resize(count);
}

float sum(const std::vector<float>& x) {
  float total = 0.0f;
  for (float each : x) total += each;
  return total;
}

void soften(std::vector<float>& x) {
  exponentials(x, *std::max_element(x.begin(), x.end()), 1.0f);
  const float total = sum(x);
  for (float& each : x) each /= total;
}

}  // namespace

void choose_experts(const float* logits, int64_t count, int64_t ranks, Gating gating, bool normalised, int32_t* experts,
                    float* weights) {
  thread_local std::vector<float> scores, chosen;
  scores.assign(logits, logits + count), chosen.clear();
  if (gating == Gating::kSoftmax) soften(scores);
  if (gating == Gating::kSigmoid) {
    exponentials(scores, 0.0f, -1.0f);
    for (float& each : scores) each = 1.0f / (1.0f + each);
  }
  const auto before = [&](int32_t a, int32_t b) { return scores[a] > scores[b] || (scores[a] != scores[a] && scores[b] == scores[b]); };
  for (int64_t j = 0; j < ranks; ++j) {
    int32_t best = -1;  // a NaN is the best: passed over, it would be lost
    for (int32_t e = 0; e < count; ++e)
      if (std::find(experts, experts + j, e) == experts + j && (best < 0 || before(e, best))) best = e;
    experts[j] = best, chosen.push_back(scores[best]);
  }
  if (gating == Gating::kChosen) soften(chosen);
  const float total = normalised ? std::max(sum(chosen), kLeastSum) : 1.0f;
  for (int64_t j = 0; j < ranks; ++j) weights[j] = chosen[j] / total;
}

void run_experts(const ExpertWeights& weights, const ExpertRows& rows) {
  thread_local Work work;
  Forward forward(weights, rows, work);
  run_phases(forward);
}

}  // namespace specsparse
