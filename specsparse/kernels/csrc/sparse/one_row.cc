#include "sparse/one_row.h"

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

}  // namespace specsparse
