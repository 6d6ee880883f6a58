#include "sparse/one_row.h"

#include "pool/pool.h"

namespace specsparse {

void OneRow::begin(SparseCall& call) {
  call_ = &call;
  const int count = threads();
  items_ = count == 1 ? 1 : SparseCall::kSegments;
  while (items_ > 2 * count && call.read() < items_ * kItemNeurons) items_ /= 2;
  step_ = std::clamp<int64_t>(kStepBytes / call.ffn->up.row_bytes / kRowGroup * kRowGroup, kRowGroup, kStep);
  reserve(neurons_, call.read()), reserve(values_, call.read());
}

void OneRow::run(int64_t item) {
  const int64_t from = share_begin(SparseCall::kSegments, item, items_), to = share_begin(SparseCall::kSegments, item + 1, items_);
  const int64_t first = call_->begin_of(from), last = call_->begin_of(to);
  std::fill_n(call_->added.begin() + from, to - from, 0);
  if (first == last) return;
  thread_local Lines<float> memory;
  float* scratch = reserve(memory, call_->most_scratch());
  Added list = {0, neurons_.data() + first, values_.data() + first};
  Opened opened[2];
  int64_t done = 0, segment = from;  // of the list, as far as it has been added
  for (int64_t b = first, turn = 0;; b += step_, turn ^= 1) {
    Opened &now = opened[turn], &before = opened[turn ^ 1];
    const bool drained = b >= last;
    // Products are taken in groups; what is left over waits for those that follow.
    const int64_t whole = drained ? before.count : before.count / kRowGroup * kRowGroup, rest = before.count - whole;
    std::copy_n(before.neurons + whole, rest, now.neurons);
    std::copy_n(before.places + whole, rest, now.places);
    std::copy_n(before.gates + whole, rest, now.gates);
    now.count = rest;
    if (!drained)
      open(b, std::min(step_, last - b), &now, scratch);
    else if (const int64_t likely = std::min(step_, end_of(item) - last); likely > 0)
      now.count = likely, std::copy_n(call_->kept.neurons.data() + last, likely, now.neurons);
    Ahead ahead{now.neurons + rest, now.count - rest};
    multiply(before, whole, ahead, &list, scratch);
    for (; done < list.count; ++segment) {
      int64_t end = done;
      while (end < list.count && list.neurons[end] < call_->bound(segment + 1)) ++end;
      const bool complete = drained || end < list.count;
      const int64_t ready = complete ? end - done : (end - done) / kRowGroup * kRowGroup;
      add(list, done, ready, segment, &ahead, scratch);
      done += ready;
      if (!complete) break;
    }
    for (; ahead.at < ahead.count; ++ahead.at) call_->ffn->down.fetch(ahead.neurons[ahead.at]);
    if (drained) return;
  }
}

// The end of what this thread is likely to read next: neurons of the items after its own, where gates do not close.
int64_t OneRow::end_of(int64_t item) const {
  if (call_->closes()) return 0;
  for (int t = 1, all = threads(); t <= all; ++t)
    if (share_begin(items_, t, all) == item + 1) return 0;
  return call_->read();
}

// The gates of neurons [first, first + count) of the union, while those of as many behind are fetched.
void OneRow::open(int64_t first, int64_t count, Opened* to, float* scratch) const {
  const NeuronRows& w = call_->decides();
  const int32_t* js = call_->kept.neurons.data();
  const int64_t end = call_->read() - 1;
  alignas(64) float gates[kStep + 16];
  for (int64_t i = 0; i < count; i += kRowGroup) {
    const uint8_t* next[kRowGroup];
    for (int64_t k = 0; k < kRowGroup; ++k) next[k] = w.row(js[std::min(first + i + k + step_, end)]);
    sparse_ops().dot_group(w, js + first + i, next, static_cast<int>(std::min<int64_t>(kRowGroup, count - i)), *call_->inputs[0],
                           gates + i, scratch);
  }
  activate(gates, count, call_->ffn->act);
  std::fill_n(call_->active.begin() + first, count, uint8_t{0});
  int64_t found = to->count;
  for (int64_t i = 0; i < count; ++i) {  // no branch: which gates open cannot be guessed
    to->neurons[found] = js[first + i], to->places[found] = static_cast<int32_t>(first + i), to->gates[found] = gates[i];
    found += call_->open(gates[i]);
  }
  to->count = found;
}

// Appends what the first `count` neurons add to the row, while rows of up that follow are fetched.
void OneRow::multiply(const Opened& from, int64_t count, const Ahead& next, Added* list, float* scratch) const {
  const SparseFfn& ffn = *call_->ffn;
  alignas(64) float up[Opened::kMost + 16];
  if (ffn.gate) {
    for (int64_t i = 0; i < count; i += kRowGroup) {
      const uint8_t* ahead[kRowGroup];
      for (int64_t k = 0; k < kRowGroup; ++k) ahead[k] = ffn.up.row(i + k < next.count ? next.neurons[i + k] : from.neurons[i]);
      sparse_ops().dot_group(ffn.up, from.neurons + i, ahead, static_cast<int>(std::min<int64_t>(kRowGroup, count - i)),
                             *call_->inputs[0], up + i, scratch);
    }
    for (int64_t i = (count + kRowGroup - 1) / kRowGroup * kRowGroup; i < next.count; ++i) ffn.up.fetch(next.neurons[i]);
    activate(up, count, ffn.up_act);
  }
  for (int64_t i = 0; i < count; ++i) {
    const float value = ffn.gate ? from.gates[i] * up[i] : from.gates[i];
    list->neurons[list->count] = from.neurons[i], list->values[list->count] = value;
    list->count += value != 0, call_->active[from.places[i]] = value != 0;
  }
}

// Adds `count` neurons of the list to a segment, while rows of down that follow are fetched.
void OneRow::add(const Added& list, int64_t first, int64_t count, int64_t segment, Ahead* next, float* scratch) const {
  if (!count) return;
  const NeuronRows& w = call_->ffn->down;
  float* sums = call_->part(segment, 0);
  if (!call_->added[segment]) std::fill_n(sums, call_->width(), 0.0f);
  call_->added[segment] += static_cast<int32_t>(count);
  int32_t ahead[2 * Opened::kMost];
  for (int64_t i = 0; i < count; ++i) ahead[i] = next->at < next->count ? next->neurons[next->at++] : list.neurons[first];
  sparse_ops().add(w, list.neurons + first, list.values + first, ahead, count, 0, w.chunks(), sums, scratch);
}

}  // namespace specsparse
