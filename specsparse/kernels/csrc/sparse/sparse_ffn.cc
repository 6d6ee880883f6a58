#include "sparse/sparse_ffn.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "pool/pool.h"
#include "sparse/sparse_inputs.h"

namespace specsparse {
namespace {

constexpr int64_t kItemNeurons = 64;         // of one item, at most
constexpr int64_t kAtOnce = 16;              // neurons whose gate is computed before those that it opens are fetched
constexpr int64_t kKeptBytes = 512 << 10;    // of down rows that wait in a cache for the sums
constexpr int64_t kFewThreads = 8;           // to which a single row's segments are shared out evenly enough
constexpr int64_t kStep = 16;                // neurons of a segment between whose gates and products something is fetched
constexpr int64_t kStepBytes = 36 << 10;     // of their rows, at most
constexpr int64_t kTileBytes = 256 << 10;    // of down rows that several rows of activations read: half a core's L2
constexpr int64_t kSumBytes = 128 << 10;     // of the sums that they are added to
constexpr int64_t kAheadBytes = 8 << 10;      // of the rows that are fetched ahead of a product
constexpr int64_t kSumChunks = 8;            // added up together in the sum of sums
constexpr int64_t kFewSums = 1024;           // floats

// The neurons of one item that have something to add to a row, ascending.
struct Tile {
  int64_t count;
  int32_t* neurons;
  float* values;
};

// Room for whole vectors is there after x. A NaN stays one, or a closed gate would hide it.
void activate(float* x, int64_t count, Activation act, const float* ones) {
  static_assert(int64_t(Act::kSilu) == Activation::kSilu && int64_t(Act::kRelu2) == Activation::kRelu2);
  if (act.kind == Activation::kFatRelu) {
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] > act.threshold ? x[i] : 0.0f;
  } else if (act.kind == Activation::kRelu || act.kind == Activation::kRelu2) {
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] < 0 ? 0.0f : x[i];
    if (act.kind == Activation::kRelu2)
      for (int64_t i = 0; i < count; ++i) x[i] *= x[i];
  } else if (act.kind == Activation::kSilu) {
    const int64_t whole = (count + 15) / 16 * 16;
    std::fill(x + count, x + whole, 0.0f);
    ops().glu(x, ones, whole, Act::kSilu);
  }
}

constexpr auto make_ones = [] {
  std::array<float, kStep + 16> ones{};
  for (float& one : ones) one = 1.0f;
  return ones;
};
alignas(64) constexpr auto kAllOnes = make_ones();
constexpr const float* kOnes = kAllOnes.data();

// One call: rows of activations, their neurons, and what each item of neurons gives to each row.
class Call final : public SparseSteps {
 public:
  void collect(const SparseFfn& ffn, const uint8_t* keep, const int32_t* rows, int64_t count, SparseCounts* counts) override {
    ffn_ = &ffn, count_ = count, rows_ = rows, counts_ = counts;
    union_.collect(keep, ffn.up.rows, rows, count, counts->kept);
    inputs_.make(ffn, count);
    const int64_t total = union_.neurons.size();
    near_ = ffn.down.row_bytes * total <= kKeptBytes;
    whole_ = count == 1 && threads() <= kFewThreads;
    per_item_ = std::clamp<int64_t>((total / (16 * threads()) + kAtOnce - 1) / kAtOnce * kAtOnce, 2 * kAtOnce, kItemNeurons);
    // One thread takes all segments in one go: the beginning of an item waits for memory.
    items_ = whole_ ? (threads() == 1 ? 1 : kSegments) : (total + per_item_ - 1) / per_item_;
    reserve_tiles();
  }

  void prepare(const float* x, int64_t i) override { inputs_.prepare(x + rows_[i] * ffn_->up.cols, *ffn_, i); }

  int64_t hidden_items() const override { return items_; }

  void join(int64_t i) override { counts_->nonzero[rows_[i]] = whole_ ? found() : join_tiles(i); }

  int32_t read() const override { return static_cast<int32_t>(union_.neurons.size()); }

  int32_t active() const override { return std::accumulate(active_.begin(), active_.begin() + read(), 0); }

  int64_t project_items() const override { return whole_ || !count_ ? 0 : kSegments; }

  int64_t sum_items() const override { return count_ * sum_blocks(); }

  void sum(int64_t item, const float* residual, float* y) override {
    const int64_t blocks = sum_blocks(), t = item / blocks;
    const int64_t first = item % blocks * sum_chunks(), last = std::min(ffn_->down.chunks(), first + sum_chunks());
    for (int64_t c = first; c < last; c += kSumChunks) sum_segments(t, c, residual, rows_[t], y);
  }

  const std::vector<int32_t>& neurons() const { return union_.neurons; }
  // Whether neuron i of the union is not zero in some row.
  bool active(int64_t i) const { return active_[i]; }

 private:
  // Few sums are one item: they take less time than another thread needs to hear of them.
  int64_t sum_chunks() const { return count_ * width() <= kFewSums ? ffn_->down.chunks() : kSumChunks; }
  int64_t sum_blocks() const { return (ffn_->down.chunks() + sum_chunks() - 1) / sum_chunks(); }

  void reserve_tiles() {
    const int64_t tiles = whole_ ? kSegments : items_;
    const int64_t slots = std::max<int64_t>(tiles * count_ * per_item_, read());  // and as many again for the lists
    const int64_t room = tiles * per_item_ + kRowGroup;                           // of a list
    int32_t* ids = reserve(neurons_, slots + count_ * room);
    float* values = reserve(values_, slots + count_ * room);
    Tile* own = reserve(tiles_, tiles * count_);
    for (int64_t i = 0; i < tiles * count_; ++i) own[i] = {0, ids + i * per_item_, values + i * per_item_};
    Tile* lists = reserve(lists_, count_);
    for (int64_t t = 0; t < count_; ++t)
      lists[t] = {0, ids + slots + t * room, values + slots + t * room};
    reserve(active_, union_.neurons.size());
    reserve(parts_, kSegments * count_ * width());
  }

  int64_t width() const { return (ffn_->down.chunks() + 1) / 2 * 2 * kChunk; }  // whole pairs of chunks

 public:
  // Gate, up and activation of one item's neurons, each for the rows that keep it. Where the gate gives 0 up is not read.
  void hidden(int64_t item) override {
    if (count_ == 1) return whole_ ? segments_of_one(item) : item_of_one(item);
    const int64_t first = item * per_item_, last = std::min<int64_t>(union_.neurons.size(), first + per_item_);
    thread_local Lines<float> memory;
    thread_local std::vector<uint64_t> masks;
    const int64_t pairs = (per_item_ * count_ + 15) / 16 * 16;
    float* gate = reserve(memory, 3 * pairs + scratch_floats(ffn_->up));
    float *up = gate + pairs, *ones = up + pairs, *scratch = ones + pairs;
    uint64_t* live = reserve(masks, per_item_);
    std::fill(ones, ones + pairs, 1.0f);
    const uint64_t* kept = union_.rows.data() + first;
    // Where gates do not close, rows of up are fetched while those of gate are multiplied, and the other way round.
    const NeuronRows& decides = ffn_->gate ? *ffn_->gate : ffn_->up;
    const int32_t* js = union_.neurons.data();
    const int64_t after = std::min<int64_t>(per_item_, read() - last);
    const bool both = ffn_->gate && !closes();
    const Ahead own{js + first, last - first}, next{js + last, after};
    activate(gate, products(decides, first, last, kept, gate, scratch, both ? ffn_->up : decides, both ? own : next), ffn_->act, ones);
    const float* a = gate;
    for (int64_t i = 0; i < last - first; ++i) {
      live[i] = 0;
      for (uint64_t left = kept[i]; left; left &= left - 1, ++a)
        if (*a != 0 && !(std::abs(*a) < ffn_->least)) live[i] |= left & -left;
    }
    if (ffn_->gate)
      activate(up, products(ffn_->up, first, last, live, up, scratch, decides, both ? next : Ahead{nullptr, 0}), ffn_->up_act, ones);
    Tile* tiles = tiles_.data() + item * count_;
    for (int64_t i = first; i < last; ++i) {
      active_[i] = 0;
      for (uint64_t left = union_.rows[i]; left; left &= left - 1, ++gate) {
        if (!(live[i - first] & left & -left)) continue;
        const float value = ffn_->gate ? *gate * *up++ : *gate;
        if (value == 0) continue;
        Tile& tile = tiles[__builtin_ctzll(left)];
        tile.neurons[tile.count] = union_.neurons[i], tile.values[tile.count++] = value, active_[i] = 1;
      }
    }
  }

 private:
  // Neurons js[0 .. count) times the only row. `listed` >= count neurons may be read from js: those behind are fetched.
  void dots(const NeuronRows& w, const int32_t* js, int64_t count, int64_t listed, float* out, float* scratch) {
    const int64_t distance = std::max<int64_t>(kRowGroup, kAheadBytes / w.row_bytes);
    for (int64_t i = 0; i < count; i += kRowGroup) {
      const uint8_t* next[kRowGroup];
      for (int64_t k = 0; k < kRowGroup; ++k) next[k] = w.row(js[std::min(i + k + distance, listed - 1)]);
      sparse_ops().dot_group(w, js + i, next, static_cast<int>(std::min<int64_t>(kRowGroup, count - i)), *inputs_[0], out + i,
                             scratch);
    }
  }

  int64_t bound(int64_t segment) const { return segment * ffn_->down.rows / kSegments; }
  // The first of the union's neurons that belongs to a segment, or to a later one.
  int64_t begin_of(int64_t segment) const {
    const std::vector<int32_t>& js = union_.neurons;
    return std::lower_bound(js.begin(), js.end(), bound(segment)) - js.begin();
  }

  void item_of_one(int64_t item) {
    const int64_t first = item * per_item_;
    hidden_of_one(first, std::min<int64_t>(per_item_, read() - first), &tiles_[item]);
  }

  // Neurons to be fetched, of which `at` were.
  struct Ahead {
    const int32_t* neurons;
    int64_t count, at = 0;
  };

  // Neurons of a segment on their way: their gates are open, and up and down are to come.
  struct Opened {
    int64_t count = 0;
    int32_t neurons[kStep], places[kStep];  // and where they stand in the union
    alignas(64) float gates[kStep + 16];
  };

  // Whole segments, from the gate to the output, a few neurons at a time. All that a step reads is fetched one step before and
  // while something is computed, so that memory is never idle: a gate's rows while the gates before it are computed, rows of up
  // and of down, once the gate is open, while those of the step before are.
  void segments_of_one(int64_t item) {
    const int64_t from = item * kSegments / items_, to = (item + 1) * kSegments / items_;
    const int64_t first = begin_of(from), last = begin_of(to);
    for (int64_t i = from; i < to; ++i) tiles_[i].count = 0;
    Tile list = {0, neurons_.data() + first, values_.data() + first};
    if (first == last) return;
    thread_local Lines<float> memory;
    float* scratch = reserve(memory, most_scratch());
    const int64_t step = std::clamp<int64_t>(kStepBytes / ffn_->up.row_bytes / kRowGroup * kRowGroup, kRowGroup, kStep);
    Opened opened[2];
    int64_t added = 0, segment = from;  // of the list
    for (int64_t b = first, turn = 0;; b += step, turn ^= 1) {
      Opened &now = opened[turn], &before = opened[turn ^ 1];
      now.count = 0;
      if (b < last)
        open(b, std::min(step, last - b), step, &now, scratch);
      else
        expect(b, std::min(step, end_of(item) - b), &now);
      multiply(before, now, &list, scratch);
      Ahead ahead{now.neurons, now.count};
      while (added < list.count) {
        const int64_t end = std::lower_bound(list.neurons + added, list.neurons + list.count, bound(segment + 1)) - list.neurons;
        const bool complete = end < list.count || b >= last;
        const int64_t ready = complete ? end - added : (end - added) / kRowGroup * kRowGroup;
        add(list, added, ready, segment, &ahead, scratch);
        added += ready;
        if (!complete) break;
        ++segment;
      }
      for (; ahead.at < ahead.count; ++ahead.at) ffn_->down.fetch(ahead.neurons[ahead.at]);
      if (b >= last) return;
    }
  }

  // What this thread is likely to read next: neurons of the items after its own, where gates do not close.
  int64_t end_of(int64_t item) const {
    if (closes()) return 0;
    for (int t = 1, all = threads(); t <= all; ++t)
      if (share_begin(items_, t, all) == item + 1) return 0;
    return read();
  }
  void expect(int64_t first, int64_t count, Opened* to) const {
    to->count = std::max<int64_t>(count, 0);
    std::copy_n(union_.neurons.data() + first, to->count, to->neurons);
  }
  bool closes() const { return ffn_->least > 0 || (ffn_->act.kind != Activation::kSilu && ffn_->act.kind != Activation::kNone); }

  // The gates of neurons [first, first + count) of the union, while those of `step` neurons behind are fetched.
  void open(int64_t first, int64_t count, int64_t step, Opened* to, float* scratch) {
    const NeuronRows& decides = ffn_->gate ? *ffn_->gate : ffn_->up;
    const int32_t* js = union_.neurons.data();
    const int64_t end = read() - 1;
    alignas(64) float gates[kStep + 16];
    for (int64_t i = 0; i < count; i += kRowGroup) {
      const uint8_t* next[kRowGroup];
      for (int64_t k = 0; k < kRowGroup; ++k) next[k] = decides.row(js[std::min(first + i + k + step, end)]);
      sparse_ops().dot_group(decides, js + first + i, next, static_cast<int>(std::min<int64_t>(kRowGroup, count - i)), *inputs_[0],
                             gates + i, scratch);
    }
    activate(gates, count, ffn_->act, kOnes);
    std::fill_n(active_.begin() + first, count, uint8_t{0});
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {  // no branch: which gates open cannot be guessed
      to->neurons[found] = js[first + i], to->places[found] = static_cast<int32_t>(first + i), to->gates[found] = gates[i];
      found += gates[i] != 0 && !(std::abs(gates[i]) < ffn_->least);
    }
    to->count = found;
  }

  // Appends what neurons add to a row, while rows of up that follow are fetched.
  void multiply(const Opened& from, const Opened& next, Tile* tile, float* scratch) {
    alignas(64) float up[kStep + 16];
    if (ffn_->gate) {
      const NeuronRows& w = ffn_->up;
      for (int64_t i = 0; i < from.count; i += kRowGroup) {
        const uint8_t* ahead[kRowGroup];
        for (int64_t k = 0; k < kRowGroup; ++k) ahead[k] = w.row(i + k < next.count ? next.neurons[i + k] : from.neurons[i]);
        sparse_ops().dot_group(w, from.neurons + i, ahead, static_cast<int>(std::min<int64_t>(kRowGroup, from.count - i)),
                               *inputs_[0], up + i, scratch);
      }
      for (int64_t i = (from.count + kRowGroup - 1) / kRowGroup * kRowGroup; i < next.count; ++i) w.fetch(next.neurons[i]);
      activate(up, from.count, ffn_->up_act, kOnes);
    }
    for (int64_t i = 0; i < from.count; ++i) {
      const float value = ffn_->gate ? from.gates[i] * up[i] : from.gates[i];
      tile->neurons[tile->count] = from.neurons[i], tile->values[tile->count] = value;
      tile->count += value != 0, active_[from.places[i]] = value != 0;
    }
  }

  // Adds `count` neurons of a list to a segment, while rows of down that follow are fetched.
  void add(const Tile& list, int64_t first, int64_t count, int64_t segment, Ahead* next, float* scratch) {
    if (!count) return;
    const NeuronRows& w = ffn_->down;
    float* sums = parts_.data() + segment * width();
    if (!tiles_[segment].count) std::fill(sums, sums + width(), 0.0f);
    tiles_[segment].count += count;
    int32_t ahead[2 * kStep];
    for (int64_t i = 0; i < count; ++i) ahead[i] = next->at < next->count ? next->neurons[next->at++] : list.neurons[first];
    sparse_ops().add(w, list.neurons + first, list.values + first, ahead, count, 0, w.chunks(), sums, scratch);
  }

  int64_t most_scratch() const {
    return std::max({scratch_floats(ffn_->up), scratch_floats(ffn_->down), ffn_->gate ? scratch_floats(*ffn_->gate) : 0});
  }

  int32_t found() const {
    int64_t count = 0;
    for (int64_t i = 0; i < kSegments; ++i) count += tiles_[i].count;
    return static_cast<int32_t>(count);
  }

  // `hidden` of a single row and neurons [first, first + count) of the union, count <= kItemNeurons: lists instead of masks, and
  // no branches that cannot be guessed.
  void hidden_of_one(int64_t first, int64_t count, Tile* tile) {
    const int64_t total = read();
    const int32_t* js = union_.neurons.data() + first;
    thread_local Lines<float> memory;
    const int64_t room = kItemNeurons + kAtOnce;
    float* gate = reserve(memory, 4 * room + std::max(scratch_floats(ffn_->up), ffn_->gate ? scratch_floats(*ffn_->gate) : 0));
    float *up = gate + room, *open = up + room, *ones = open + room, *scratch = ones + room;
    std::fill_n(ones, room, 1.0f);
    int32_t places[kItemNeurons];
    int64_t found = 0;
    const NeuronRows& decides = ffn_->gate ? *ffn_->gate : ffn_->up;
    for (int64_t b = 0; b < count; b += kAtOnce) {
      const int64_t some = std::min(kAtOnce, count - b), before = found;
      dots(decides, js + b, some, total - first - b, gate + b, scratch);
      activate(gate + b, some, ffn_->act, ones);
      for (int64_t i = b; i < b + some; ++i) {
        places[found] = static_cast<int32_t>(i), open[found] = gate[i];
        found += gate[i] != 0 && !(std::abs(gate[i]) < ffn_->least);
      }
      for (int64_t i = before; i < found; ++i) {
        if (ffn_->gate) ffn_->up.fetch(js[places[i]]);
        if (near_) ffn_->down.fetch(js[places[i]]);
      }
    }
    int32_t live[kItemNeurons];
    for (int64_t i = 0; i < found; ++i) live[i] = js[places[i]];
    if (ffn_->gate) {
      dots(ffn_->up, live, found, found, up, scratch);
      activate(up, found, ffn_->up_act, ones);
    }
    std::fill_n(active_.begin() + first, count, uint8_t{0});
    for (int64_t i = 0; i < found; ++i) {
      const float value = ffn_->gate ? open[i] * up[i] : open[i];
      tile->neurons[tile->count] = live[i], tile->values[tile->count] = value;
      tile->count += value != 0, active_[first + places[i]] = value != 0;
    }
  }

  // Neurons [first, last) of the union times the rows of their masks, out neuron by neuron; how many products. Meanwhile `ahead`
  // of `next` are fetched or, where there are none, those that follow.
  int64_t products(const NeuronRows& w, int64_t first, int64_t last, const uint64_t* masks, float* out, float* scratch,
                   const NeuronRows& next, Ahead ahead) {
    if (w.is_float() || !sparse_ops().groups) return products_by_neuron(w, first, last, masks, out, scratch);
    int32_t begin[kItemNeurons], total = 0;
    for (int64_t i = first; i < last; ++i) begin[i - first] = total, total += __builtin_popcountll(masks[i - first]);
    int64_t done = 0;
    for (int64_t t = 0; t < count_; ++t) {
      int32_t js[kItemNeurons + 1], places[kItemNeurons + 1], some = 0;
      for (int64_t i = 0; i < last - first; ++i) {
        js[some] = union_.neurons[first + i], places[some] = begin[i];
        some += masks[i] >> t & 1, begin[i] += masks[i] >> t & 1;
      }
      for (int32_t k = 0; k < some; k += kRowGroup) {
        const int count = static_cast<int>(std::min<int32_t>(kRowGroup, some - k));
        done += count;
        const uint8_t* rows[kRowGroup];
        const int64_t wanted = ahead.count * done / total;
        for (int r = 0; r < kRowGroup; ++r)
          rows[r] = ahead.at < wanted ? next.row(ahead.neurons[ahead.at++])
                                      : w.row(js[ahead.neurons ? k : std::min(k + r + kRowGroup, some - 1)]);
        float found[kRowGroup];
        sparse_ops().dot_group(w, js + k, rows, count, *inputs_[t], found, scratch);
        for (int r = 0; r < count; ++r) out[places[k + r]] = found[r];
      }
    }
    return total;
  }

  int64_t products_by_neuron(const NeuronRows& w, int64_t first, int64_t last, const uint64_t* masks, float* out, float* scratch) {
    thread_local std::vector<int64_t> wanted;
    wanted.clear();
    for (int64_t i = first; i < last; ++i)
      if (masks[i - first]) wanted.push_back(i);
    const int64_t count = wanted.size(), distance = std::max<int64_t>(1, kAheadBytes / w.row_bytes);
    int64_t done = 0;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = wanted[k];
      const uint8_t* ahead = w.row(union_.neurons[wanted[std::min(k + distance, count - 1)]]);
      for (uint64_t left = masks[i - first]; left;) {
        const Input* inputs[kRowTokens];
        int n = 0;
        for (; left && n < kRowTokens; left &= left - 1) inputs[n++] = inputs_[__builtin_ctzll(left)];
        sparse_ops().dot(w, union_.neurons[i], ahead, inputs, n, out + done, scratch);
        done += n;
      }
    }
    return done;
  }

  // The tiles of a row as one list; its length.
  int32_t join_tiles(int64_t t) {
    Tile& list = lists_[t];
    for (int64_t item = 0; item < items_; ++item) {
      const Tile& tile = tiles_[item * count_ + t];
      std::copy_n(tile.neurons, tile.count, list.neurons + list.count);
      std::copy_n(tile.values, tile.count, list.values + list.count);
      list.count += tile.count;
    }
    // What is read ahead of the last.
    std::fill_n(list.neurons + list.count, kRowGroup, list.count ? list.neurons[list.count - 1] : 0);
    return static_cast<int32_t>(list.count);
  }

 public:
  // Down rows of one segment's neurons, for all rows of activations: they take turns every few neurons, so that the second
  // finds them in the cache, and every few columns, so that the sums stay there too.
  void project(int64_t segment) override {
    const NeuronRows& down = ffn_->down;
    const int64_t last = begin_of(segment + 1);
    const int64_t chunks = down.chunks(), unit = kSuper / kChunk;
    const int64_t stripe = std::min(chunks, std::max(unit, kSumBytes / (count_ * kChunk * 4) / unit * unit));
    const int64_t step = count_ == 1 ? last : std::max<int64_t>(kRowGroup, kTileBytes / down.row_bytes);
    thread_local Lines<float> memory;
    float* scratch = reserve(memory, scratch_floats(down));
    float* parts = parts_.data() + segment * count_ * width();
    const int64_t first = begin_of(segment);
    for (int64_t i = first, from = 0; i < last; i += step, from = 1)
      for (int64_t c = 0; c < chunks; c += stripe)
        for (int64_t t = 0; t < count_; ++t) {
          const Tile& list = lists_[t];
          const auto at = [&](int64_t k) { return std::lower_bound(list.neurons, list.neurons + list.count, k) - list.neurons; };
          const int64_t some = at(union_.neurons[i]), stop = i + step < last ? at(union_.neurons[i + step]) : at(bound(segment + 1));
          float* to = parts + t * width() + c * kChunk;
          const int64_t until = std::min(chunks, c + stripe);
          if (!from) std::fill(to, to + (until - c + 1) / 2 * 2 * kChunk, 0.0f);
          const int32_t* ahead = list.neurons + some + kRowGroup;
          if (count_ > 1) ahead = shared_ahead(list, some, stop, t, std::min(i + step, last), step, i == first);
          sparse_ops().add(down, list.neurons + some, list.values + some, ahead, stop - some, c, until, to, scratch);
        }
  }

 private:
  // What is fetched while neurons [some, stop) of a list are added: of the next tile, which begins at `begin` of the union, a
  // share for each row of activations, at an even rate. In between, the first tile fetches what follows in the list.
  const int32_t* shared_ahead(const Tile& list, int64_t some, int64_t stop, int64_t t, int64_t begin, int64_t step, bool first) {
    thread_local std::vector<int32_t> next;
    const int64_t count = stop - some, left = std::min(step, read() - begin), from = left * t / count_;
    int32_t* to = reserve(next, count);
    const int64_t share = left * (t + 1) / count_ - from;
    for (int64_t k = 0, at = 0; k < count; ++k) {
      const int64_t wanted = share * (k + 1) / count;
      to[k] = wanted > at ? union_.neurons[begin + from + at] : list.neurons[first ? some + k + kRowGroup : some];
      at = wanted;
    }
    return to;
  }

  // Columns of chunks [begin, begin + kSumChunks) of row t of y: the segments one after the other.
  void sum_segments(int64_t t, int64_t begin, const float* residual, int64_t row, float* y) {
    const NeuronRows& down = ffn_->down;
    const int64_t end = std::min(down.chunks(), begin + kSumChunks), first = begin * kChunk;
    const int64_t size = (end - begin + 1) / 2 * 2 * kChunk;
    float sums[kSumChunks * kChunk] = {}, found[kSumChunks * kChunk];
    const Tile& list = lists_[t];
    for (int64_t segment = 0, i = 0; segment < kSegments; ++segment) {
      if (whole_ ? !tiles_[segment].count : i == list.count || list.neurons[i] >= bound(segment + 1)) continue;  // nothing in it
      const float* part = parts_.data() + (segment * count_ + t) * width() + first;
      for (int64_t c = 0; c < size; ++c) sums[c] += part[c];
      if (!whole_) i = std::lower_bound(list.neurons + i, list.neurons + list.count, bound(segment + 1)) - list.neurons;
    }
    sparse_ops().in_order(down, sums, begin, end, found);
    const int64_t at = row * down.cols + first;
    for (int64_t c = 0; c < std::min((end - begin) * kChunk, down.cols - first); ++c)
      y[at + c] = residual ? residual[at + c] + found[c] : found[c];
  }

  const SparseFfn* ffn_;
  const int32_t* rows_;
  SparseCounts* counts_;
  int64_t count_, per_item_, items_;
  Inputs inputs_;
  Union union_;
  bool near_;   // down rows are few enough to wait in a core's cache
  bool whole_;  // a single row's items are segments, from the gate to the output
  std::vector<Tile> tiles_;  // by item, then row
  std::vector<Tile> lists_;  // by row: its tiles one after the other
  std::vector<int32_t> neurons_;
  std::vector<float> values_;
  std::vector<uint8_t> active_;  // by neuron of the union
  Lines<float> parts_;     // by segment, then row
};

}  // namespace

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
    call.collect(ffn, keep, rows.data() + first, count, counts);
    parallel(count, [&](int64_t i) { call.prepare(x, i); });
    parallel(call.hidden_items(), [&](int64_t item) { call.hidden(item); });
    parallel(count, [&](int64_t i) { call.join(i); });
    parallel(call.project_items(), [&](int64_t segment) { call.project(segment); });
    parallel(call.sum_items(), [&](int64_t item) { call.sum(item, residual, y); });
    const std::vector<int32_t>& neurons = call.neurons();
    for (size_t i = 0; i < neurons.size(); ++i) {
      uint8_t before = 0;
      if (total > kSparseRows) before = seen[neurons[i]], seen[neurons[i]] |= 1 | call.active(i) << 1;
      counts->read += !(before & 1), counts->active += call.active(i) && !(before & 2);
    }
  }
}

}  // namespace specsparse
