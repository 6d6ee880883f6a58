// The neurons of a sparse FFN, for a single row on a few threads and for several rows.
#include "sparse/sparse_call.h"

namespace specsparse {
void OneRow::begin(SparseCall& call, int64_t expected) {
  call_ = &call;
  const int count = threads();
  items_ = count == 1 ? 1 : SparseCall::kSegments;
  while (items_ > 2 * count && expected < items_ * kItemNeurons) items_ /= 2;
  ahead_ = std::clamp<int64_t>(kAheadBytes / call.ffn->up.row_bytes / kRowGroup * kRowGroup, kRowGroup, kAhead);
}

void OneRow::run(int64_t item, int64_t first, int64_t last) {
  const int64_t from = segment(item), to = segment(item + 1), room = (last - first + kAhead + 2 * kBatch) / 16 * 16;
  std::fill_n(call_->added.begin() + from, to - from, 0);
  if (first == last) return;
  thread_local Lines<float> floats;
  thread_local std::vector<int32_t> ids;
  float *products = reserve(floats, 3 * room + call_->most_scratch()), *scratch = products + 3 * room;
  int32_t* numbers = reserve(ids, 3 * room);
  Opened opened{0, numbers, numbers + room, products + room};
  Added list{0, numbers + 2 * room, products + 2 * room};
  open(first, last, &opened, products, scratch);
  multiply(opened, &list, products, scratch);
  if (!list.count) return;
  std::fill_n(list.neurons + list.count, ahead_, list.neurons[list.count - 1]);
  for (int64_t segment = from; segment < to; ++segment) add(list, segment, scratch);
}

// The gates of neurons [first, last) of the union.
void OneRow::open(int64_t first, int64_t last, Opened* to, float* products, float* scratch) const {
  const SparseFfn& ffn = *call_->ffn;
  const NeuronRows& w = call_->decides();
  const int32_t* js = call_->kept.neurons.data();
  std::fill(call_->active.begin() + first, call_->active.begin() + last, uint8_t{0});
  for (int64_t b = first; b < last; b += kBatch) {
    const int64_t count = std::min(kBatch, last - b);
    for (int64_t i = 0; i < count; i += kRowGroup) {
      const uint8_t* next[kRowGroup];
      for (int64_t k = 0; k < kRowGroup; ++k) {
        const int64_t at = b + i + k + ahead_, beyond = at - last;
        next[k] = at < last ? w.row(js[at]) : ffn.up.row(beyond < to->count ? to->neurons[beyond] : js[last - 1]);
      }
      const int some = static_cast<int>(std::min<int64_t>(kRowGroup, count - i));
      sparse_ops().dot_group(w, js + b + i, next, some, *call_->inputs[0], products + i, scratch);
    }
    activate(products, count, ffn.act);
    for (int64_t i = 0; i < count; ++i) {  // no branch: which gates open cannot be guessed
      to->neurons[to->count] = js[b + i], to->places[to->count] = static_cast<int32_t>(b + i), to->gates[to->count] = products[i];
      to->count += call_->open(products[i]);
    }
  }
}

// What open neurons add to the row.
void OneRow::multiply(const Opened& from, Added* list, float* products, float* scratch) const {
  const SparseFfn& ffn = *call_->ffn;
  for (int64_t b = 0; b < from.count; b += kBatch) {
    const int64_t count = std::min(kBatch, from.count - b);
    for (int64_t i = 0; ffn.gate && i < count; i += kRowGroup) {
      const uint8_t* next[kRowGroup];
      for (int64_t k = 0; k < kRowGroup; ++k) {
        const int64_t at = b + i + k + ahead_, beyond = at - from.count;
        next[k] = at < from.count ? ffn.up.row(from.neurons[at])
                                  : ffn.down.row(beyond < list->count ? list->neurons[beyond] : from.neurons[from.count - 1]);
      }
      const int some = static_cast<int>(std::min<int64_t>(kRowGroup, count - i));
      sparse_ops().dot_group(ffn.up, from.neurons + b + i, next, some, *call_->inputs[0], products + i, scratch);
    }
    if (ffn.gate) activate(products, count, ffn.up_act);
    for (int64_t i = 0; i < count; ++i) {
      const float value = ffn.gate ? from.gates[b + i] * products[i] : from.gates[b + i];
      list->neurons[list->count] = from.neurons[b + i], list->values[list->count] = value;
      list->count += value != 0, call_->active[from.places[b + i]] = value != 0;
    }
  }
}

// The down rows of a segment's neurons; the list goes on behind its end with neurons that are there already.
void OneRow::add(const Added& list, int64_t segment, float* scratch) const {
  const NeuronRows& w = call_->ffn->down;
  const auto at = [&](int64_t j) { return std::lower_bound(list.neurons, list.neurons + list.count, j) - list.neurons; };
  const int64_t first = at(call_->bound(segment)), count = at(call_->bound(segment + 1)) - first;
  call_->added[segment] = static_cast<int32_t>(count);
  if (!count) return;
  float* sums = call_->part(segment, 0);
  std::fill_n(sums, call_->width(), 0.0f);
  sparse_ops().add(w, list.neurons + first, list.values + first, list.neurons + first + ahead_, count, 0, w.chunks(), sums, scratch);
}

void SeveralRows::begin(SparseCall& call) {
  call_ = &call;
  const int64_t total = call.read(), count = call.count;
  per_item_ = std::clamp<int64_t>((total / (16 * threads()) + 15) / 16 * 16, kLeastNeurons, kItemNeurons);
  items_ = (total + per_item_ - 1) / per_item_;
  const int64_t slots = items_ * count * per_item_, room = items_ * per_item_ + kRowGroup;  // of all tiles, of a list
  int32_t* ids = reserve(neurons_, slots + count * room);
  float* values = reserve(values_, slots + count * room);
  Added* own = reserve(tiles_, items_ * count);
  for (int64_t i = 0; i < items_ * count; ++i) own[i] = {0, ids + i * per_item_, values + i * per_item_};
  Added* lists = reserve(lists_, count);
  for (int64_t t = 0; t < count; ++t) lists[t] = {0, ids + slots + t * room, values + slots + t * room};
}

// Gate, up and activation of one item's neurons, each for the rows that keep it. Where the gate gives 0 up is not read.
void SeveralRows::hidden(int64_t item) {
  const SparseFfn& ffn = *call_->ffn;
  const int64_t count = call_->count, first = item * per_item_, last = std::min(call_->read(), first + per_item_);
  thread_local Lines<float> memory;
  thread_local std::vector<uint64_t> masks;
  const int64_t pairs = (per_item_ * count + 15) / 16 * 16;
  float* gate = reserve(memory, 2 * pairs + call_->most_scratch());
  float *up = gate + pairs, *scratch = up + pairs;
  uint64_t* live = reserve(masks, per_item_);
  const uint64_t* kept = call_->kept.rows.data() + first;
  // Where gates do not close, rows of up are fetched while those of gate are multiplied, and the other way round.
  const NeuronRows& decides = call_->decides();
  const int32_t* js = call_->kept.neurons.data();
  const int64_t after = std::min(per_item_, call_->read() - last);
  const bool both = ffn.gate && !call_->closes();
  const Ahead own{js + first, last - first}, next{js + last, after};
  activate(gate, products(decides, first, last, kept, gate, scratch, both ? ffn.up : decides, both ? own : next), ffn.act);
  const float* a = gate;
  for (int64_t i = 0; i < last - first; ++i) {
    live[i] = 0;
    for (uint64_t left = kept[i]; left; left &= left - 1, ++a)
      if (call_->open(*a)) live[i] |= left & -left;
  }
  if (ffn.gate)
    activate(up, products(ffn.up, first, last, live, up, scratch, decides, both ? next : Ahead{nullptr, 0}), ffn.up_act);
  Added* tiles = tiles_.data() + item * count;
  for (int64_t i = first; i < last; ++i) {
    call_->active[i] = 0;
    for (uint64_t left = call_->kept.rows[i]; left; left &= left - 1, ++gate) {
      if (!(live[i - first] & left & -left)) continue;
      const float value = ffn.gate ? *gate * *up++ : *gate;
      if (value == 0) continue;
      Added& tile = tiles[__builtin_ctzll(left)];
      tile.neurons[tile.count] = js[i], tile.values[tile.count++] = value, call_->active[i] = 1;
    }
  }
}

// Neurons [first, last) of the union times the rows of their masks, out neuron by neuron; how many products. Meanwhile `ahead`
// of `next` are fetched or, where there are none, those that follow.
int64_t SeveralRows::products(const NeuronRows& w, int64_t first, int64_t last, const uint64_t* masks, float* out, float* scratch,
                              const NeuronRows& next, Ahead ahead) const {
  if (w.is_float() || !sparse_ops().groups) return products_by_neuron(w, first, last, masks, out, scratch);
  int32_t begin[kItemNeurons], total = 0;
  for (int64_t i = first; i < last; ++i) begin[i - first] = total, total += __builtin_popcountll(masks[i - first]);
  int64_t done = 0;
  for (int64_t t = 0; t < call_->count; ++t) {
    int32_t js[kItemNeurons + 1], places[kItemNeurons + 1], some = 0;
    for (int64_t i = 0; i < last - first; ++i) {
      js[some] = call_->kept.neurons[first + i], places[some] = begin[i];
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
      sparse_ops().dot_group(w, js + k, rows, count, *call_->inputs[t], found, scratch);
      for (int r = 0; r < count; ++r) out[places[k + r]] = found[r];
    }
  }
  return total;
}

int64_t SeveralRows::products_by_neuron(const NeuronRows& w, int64_t first, int64_t last, const uint64_t* masks, float* out,
                                        float* scratch) const {
  int64_t wanted[kItemNeurons], count = 0, done = 0;
  for (int64_t i = first; i < last; ++i)
    if (masks[i - first]) wanted[count++] = i;
  const int64_t distance = std::max<int64_t>(1, kAheadBytes / w.row_bytes);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t i = wanted[k];
    const uint8_t* ahead = w.row(call_->kept.neurons[wanted[std::min(k + distance, count - 1)]]);
    for (uint64_t left = masks[i - first]; left;) {
      const Input* inputs[kRowTokens];
      int n = 0;
      for (; left && n < kRowTokens; left &= left - 1) inputs[n++] = call_->inputs[__builtin_ctzll(left)];
      sparse_ops().dot(w, call_->kept.neurons[i], ahead, inputs, n, out + done, scratch);
      done += n;
    }
  }
  return done;
}

// The tiles of a row as one list.
void SeveralRows::join(int64_t t) {
  Added& list = lists_[t];
  for (int64_t item = 0; item < items_; ++item) {
    const Added& tile = tiles_[item * call_->count + t];
    std::copy_n(tile.neurons, tile.count, list.neurons + list.count);
    std::copy_n(tile.values, tile.count, list.values + list.count);
    list.count += tile.count;
  }
  // What is read ahead of the last.
  std::fill_n(list.neurons + list.count, kRowGroup, list.count ? list.neurons[list.count - 1] : 0);
  int32_t* stop = list.neurons;
  for (int64_t segment = 0; segment < SparseCall::kSegments; ++segment) {
    int32_t* const from = stop;
    stop = std::lower_bound(from, list.neurons + list.count, call_->bound(segment + 1));
    call_->added[segment * call_->count + t] = static_cast<int32_t>(stop - from);
  }
}

// Down rows of one segment's neurons, for all rows of activations: they take turns every few neurons, so that the second
// finds them in the cache, and every few columns, so that the sums stay there too.
void SeveralRows::project(int64_t segment) {
  const NeuronRows& down = call_->ffn->down;
  const std::vector<int32_t>& js = call_->kept.neurons;
  const int64_t count = call_->count, first = call_->begin_of(segment), last = call_->begin_of(segment + 1);
  const int64_t chunks = down.chunks(), unit = kSuper / kChunk;
  const int64_t stripe = std::min(chunks, std::max(unit, kSumBytes / (count * kChunk * 4) / unit * unit));
  const int64_t step = count == 1 ? last : std::max<int64_t>(kRowGroup, kTileBytes / down.row_bytes);
  thread_local Lines<float> memory;
  float* scratch = reserve(memory, call_->most_scratch());
  for (int64_t i = first; i < last; i += step)
    for (int64_t c = 0; c < chunks; c += stripe)
      for (int64_t t = 0; t < count; ++t) {
        const Added& list = lists_[t];
        const auto at = [&](int64_t j) { return std::lower_bound(list.neurons, list.neurons + list.count, j) - list.neurons; };
        const int64_t some = at(js[i]), stop = at(i + step < last ? js[i + step] : call_->bound(segment + 1));
        const int64_t until = std::min(chunks, c + stripe);
        float* to = call_->part(segment, t) + c * kChunk;
        if (i == first) std::fill_n(to, (until - c + 1) / 2 * 2 * kChunk, 0.0f);
        const int32_t* ahead = list.neurons + some + kRowGroup;
        if (count > 1) ahead = shared_ahead(list, some, stop, t, std::min(i + step, last), step, i == first);
        sparse_ops().add(down, list.neurons + some, list.values + some, ahead, stop - some, c, until, to, scratch);
      }
}

// What is fetched while neurons [some, stop) of a list are added: of the next tile, which begins at `begin` of the union, a
// share for each row of activations, at an even rate. In between, the first tile fetches what follows in the list.
const int32_t* SeveralRows::shared_ahead(const Added& list, int64_t some, int64_t stop, int64_t t, int64_t begin, int64_t step,
                                         bool first) const {
  thread_local std::vector<int32_t> next;
  const int64_t rows = call_->count, count = stop - some, left = std::min(step, call_->read() - begin), from = left * t / rows;
  int32_t* to = reserve(next, count);
  const int64_t share = left * (t + 1) / rows - from;
  for (int64_t k = 0, at = 0; k < count; ++k) {
    const int64_t wanted = share * (k + 1) / count;
    to[k] = wanted > at ? call_->kept.neurons[begin + from + at] : list.neurons[first ? some + k + kRowGroup : some];
    at = wanted;
  }
  return to;
}

}  // namespace specsparse
