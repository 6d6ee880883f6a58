// An FFN whose neurons a predictor chooses, as steps of the job of all layers: what predictor and `sparse_ffn` give one by one,
// bit for bit.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "dense/linear.h"
#include "sparse/sparse_call.h"

namespace specsparse {

// Which neurons a row computes: all, and the gate decides; those whose score second act(first z) reaches a threshold; or those
// whose gate has enough columns of the row's own signs.
enum class Choice : int64_t { kAll, kScores, kSigns };

struct PredictedWeights {
  Choice choice = Choice::kAll;
  const Description *first = nullptr, *second = nullptr;  // of kScores
  bool relu = false;                                      // act
  const float* norm = nullptr;                            // z is x normalised by it, or x itself
  const uint64_t* signs = nullptr;                        // of kSigns, [neurons][columns / 64, rounded up]
  float threshold = 0;                                    // equality keeps
  bool masked = false;  // the layer computes the neurons; of `ffn` the rows of up are there
  SparseFfn ffn{};
};

// Memory of one layer after the other, kept from call to call.
struct PredictedWork {
  std::vector<float> hidden, scores;
  std::vector<uint8_t> keep;
  std::vector<uint64_t> bits;
  std::vector<int32_t> rows;
  Union kept;  // of a layer that is masked
  std::unique_ptr<SparseSteps> steps = sparse_steps();

  // Room for up to kSparseRows rows of a layer.
  void reserve(const PredictedWeights& w, int64_t total);
};

// The FFN of one layer on rows 0 .. total - 1 of x, to which it is added; of one that is masked the choice alone.
class PredictedFfn {
 public:
  enum Step { kBegin, kPrepareFirst, kFirst, kPrepareSecond, kSecond, kKeep, kCollect, kHidden, kJoin, kProject, kSum, kSteps };

  // All must outlive this; `activations` has room for the inputs of both matrices.
  PredictedFfn(const PredictedWeights& weights, float* x, int64_t total, float eps, ActivationBuffer& activations,
               PredictedWork& work, const SparseCounts& counts);

  int64_t items(int step) const;
  void run(int step, int64_t item);
  // For thread `self`, which waits for the row to be predicted: `bytes` of what it reads next.
  void prefetch(int64_t bytes, int self, int threads) const;
  // The last step that is shared out.
  Step last() const { return project_items_ ? kProject : kHidden; }
  const SparseCounts& counts() const { return counts_; }

 private:
  bool scores() const { return weights_->choice == Choice::kScores; }
  int64_t prepared() const { return weights_->masked ? 0 : total_; }  // rows of `steps`
  // Groups of a matrix that a single row is multiplied with at a time: sums that do not wait for each other.
  static int64_t at_once(const Description& w) { return w.matrix.is_float() ? kRowGroup : kGroupsAtOnce; }
  int64_t item_groups(const Description& w) const;
  int64_t product_items(int which) const;
  void multiply(int which, int64_t item);
  void multiply_row(int which, int64_t first, int64_t last);
  static void multiply_groups(const Matrix& w, int64_t g, int count, const Activations& x, float* to);
  void keep_some(const float* scores, int64_t count, uint8_t* to) const;
  int64_t match_items() const;
  bool by_ranges() const;
  void begin();
  void run_range(int64_t range);
  void pack_signs();
  void match_signs(int64_t first, int64_t last);
  void keep(int64_t row);
  void collect();

  const PredictedWeights* weights_;
  float* x_;
  int64_t total_, width_, neurons_;
  const bool ranged_;  // whether a single row's neurons are chosen range by range, by the threads that compute them
  PredictedWork* work_;
  SparseCounts counts_;
  Preparation prepare_first_, prepare_second_;
  std::vector<Product> products_;  // first and second, or none
  // What the steps of this layer have: another layer's may be asked for by a thread that comes late to this one's.
  int64_t hidden_items_ = 0, sum_items_ = 0;
  std::atomic<int64_t> project_items_ = 0;  // read by threads that wait, for `last`, while another collects
};

// Packs the signs of `columns` values: bit k of `to` is set where x[k] < 0.
void pack_signs_of(const float* x, int64_t columns, uint64_t* to);

}  // namespace specsparse
