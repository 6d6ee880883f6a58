// Verdicts on chains and trees by rejection, and on chains by block verification, with the definitions of
// speculative/verifiers: p is the target's distribution at a row, q the one that its child was drawn from.
#include <algorithm>
#include <utility>
#include <vector>

#include "pool/pool.h"
#include "sampling/rows.h"
#include "simd/ops.h"

namespace ffi = xla::ffi;

namespace specsparse {
namespace {

// The draft of one sequence, the distributions of its rows, and its uniforms. Row 0 follows the root, row 1 + i node i.
struct Draft {
  const float* p;          // [count + 1, width]
  const float* q;          // [count, width], or null: 1 at the token
  const int32_t* tokens;   // [count]
  const int32_t* parents;  // [count], node or -1 for the root; null for a chain
  const float* coins;      // [count]
  int64_t count, width;
  const float* u;  // [kUniforms]

  bool known(int64_t i) const { return tokens[i] >= 0 && tokens[i] < width; }
  const float* q_of(int64_t i) const { return q ? q + i * width : nullptr; }
  float q_at(int64_t i) const { return !known(i) ? 0.0f : q ? q[i * width + tokens[i]] : 1.0f; }

  // p/q at token i by probabilities p, 0 where q has none of it.
  float ratio(const float* p, int64_t i) const {
    const float below = q_at(i);
    return below > 0.0f ? p[tokens[i]] / below : 0.0f;
  }

  // The first child of a row behind node `after`, or `count`.
  int64_t next_child(int64_t row, int64_t after) const {
    int64_t i = after + 1;
    while (i < count && (parents ? parents[i] + 1 : i) != row) ++i;
    return i;
  }
};

// The end of the accepted path: the row there, how many nodes were accepted and tested, and the token behind them, -1 if
// there is no distribution.
struct End {
  int64_t row = 0, accepted = 0, tested = 0;
  int32_t token = -1;
};

float cap(float a) { return a > 1.0f ? 1.0f : a; }  // NaN stays NaN

// row->e = max(0, weight * p - q), q that of node i.
void gap(const Draft& c, const float* p, int64_t i, float weight, Row* row) {
  row->make_room(c.width);
  const float* q = c.q_of(i);
  float* e = row->e.data();
  const auto over = [&](float above, float below) {  // NaN stays NaN
    const float part = weight * above, g = (part < 0.0f ? 0.0f : part) - below;
    return g < 0.0f ? 0.0f : g;
  };
  if (q) {
    for (int64_t v = 0; v < c.width; ++v) e[v] = over(p[v], q[v]);
  } else {
    for (int64_t v = 0; v < c.width; ++v) e[v] = over(p[v], 0.0f);
    if (c.known(i)) e[c.tokens[i]] = over(p[c.tokens[i]], 1.0f);
  }
}

// row->e = p, as a distribution; the token that the uniforms draw from it.
int32_t drawn(const Draft& c, const float* p, Row* row) {
  row->make_room(c.width);
  float* e = row->e.data();
  if (e != p) std::copy_n(p, c.width, e);
  const float total = mass(row);
  if (!(total > 0.0f) || !(total < std::numeric_limits<float>::infinity())) return -1;
  for (int64_t v = 0; v < c.width; ++v) e[v] = e[v] > 0.0f ? e[v] : 0.0f;
  return draw_from(row, c.u);
}

// `Rejection`: children in the order of their draw, with min(1, p/q) of what their elder siblings left of p; an accepted one
// is the parent of what follows. `p_of` gives the probabilities of a row, `nodes` takes the accepted ones.
template <class F>
End reject(const Draft& c, F&& p_of, int32_t* nodes) {
  thread_local Row one, other;
  Row *row = &one, *spare = &other;
  End end;
  const float* owed = p_of(0);
  bool refused = false;
  for (int64_t i = c.next_child(0, -1); i < c.count; i = c.next_child(end.row, i)) {
    refused = !(c.coins[i] < cap(c.ratio(owed, i)));
    if (!refused) {
      nodes[end.accepted++] = static_cast<int32_t>(i);
      end.row = i + 1, owed = p_of(end.row);
    } else if (c.q_at(i) > 0.0f) {  // a token that q could not have drawn leaves p owed in full
      gap(c, owed, i, 1.0f, spare);
      const float left = mass(spare);
      if (!(left > 0.0f)) continue;
      float* e = spare->e.data();
      for (int64_t v = 0; v < c.width; ++v) e[v] = e[v] / left;
      owed = e, std::swap(row, spare);
    }
  }
  end.tested = end.accepted + refused;
  end.token = drawn(c, owed, row);
  return end;
}

// `Block`: a chain as a whole.
template <class F>
End block(const Draft& c, F&& p_of, int32_t* nodes) {
  thread_local Row row;
  End end;
  float weight = 1.0f, kept = 1.0f;
  for (int64_t i = 0; i < c.count; ++i) {
    weight = cap(weight * c.ratio(c.p + i * c.width, i));
    if (!(weight > 0.0f)) break;  // it stays so, and no coin is under what follows
    float h = weight;
    if (i + 1 < c.count) {
      gap(c, c.p + (i + 1) * c.width, i + 1, weight, &row);
      const float s = mass(&row), all = s + (1.0f - weight);
      h = all > 0.0f ? s / all : 0.0f;
    }
    if (c.coins[i] < h) end.accepted = i + 1, kept = weight;
  }
  for (int64_t i = 0; i < end.accepted; ++i) nodes[i] = static_cast<int32_t>(i);
  end.row = end.accepted, end.tested = std::min(end.accepted + 1, c.count);
  const float* p = p_of(end.row);
  if (end.row < c.count) {  // from norm(max(0, weight * p - q)), or from weight * p if that has no mass
    gap(c, p, end.row, kept, &row);
    const float left = mass(&row);
    float* e = row.e.data();
    for (int64_t v = 0; v < c.width; ++v) e[v] = left > 0.0f ? e[v] / left : kept * p[v];
    p = e;
  }
  end.token = drawn(c, p, &row);
  return end;
}

// The chance that a token drawn from q is accepted, before it is known: sum min(p, q), or p at the token.
float alpha(const float* p, const float* q, int32_t token, int64_t width) {
  if (!q) return token >= 0 && token < width ? p[token] : 0.0f;
  thread_local Row row;
  row.make_room(width);
  float* e = row.e.data();
  for (int64_t v = 0; v < width; ++v) {
    const float least = p[v] < q[v] ? p[v] : q[v];
    e[v] = p[v] != p[v] ? p[v] : least;
  }
  return mass(&row);
}

// Of the rows i < n_valid[b] of each sequence; the others are not looked at. `temperature` and the like may be empty: the
// rows are probabilities then, and otherwise logits. Without `parents` the drafts are chains. With `whole` by `Block`, which
// takes chains alone, without by `Rejection`, which has alphas of chains.
ffi::Error judge(Floats rows, Floats temperature, Floats log_min_p, Ints32 top_k, Floats top_p, Ints32 n_valid, Ints32 tokens,
                 Ints32 parents, Floats q, Floats coins, Floats u, int64_t whole, ffi::ResultBuffer<ffi::S32> nodes,
                 ffi::ResultBuffer<ffi::S32> accepted, ffi::ResultBuffer<ffi::S32> tested, ffi::ResultBuffer<ffi::S32> token,
                 ffi::ResultBuffer<ffi::PRED> failed, ffi::ResultBuffer<ffi::F32> alphas) {
  const int64_t count = rows.dimensions()[0], width = rows.dimensions()[1], batch = n_valid.element_count();
  const int64_t n = batch ? count / batch : 0, K = n - 1;
  const Shapes shapes{temperature, log_min_p, top_k, top_p};
  const auto is = [](const auto& buffer, int64_t wanted) { return static_cast<int64_t>(buffer.element_count()) == wanted; };
  if (!batch) return ffi::Error::Success();
  const bool tree = parents.element_count();
  if (batch * n != count || (shapes.count() && shapes.count() != batch) || !is(tokens, batch * K) || !is(coins, batch * K) ||
      (tree && (whole || !is(parents, batch * K))) || !is(u, batch * kUniforms) ||
      (q.element_count() && !is(q, batch * K * width)))
    return ffi::Error::InvalidArgument("specsparse judge: rows, drafts and uniforms do not go together");
  thread_local std::vector<float> probs;
  thread_local std::vector<int64_t> wanted;
  if (shapes.count()) probs.resize(count * width);
  const float* p = shapes.count() ? probs.data() : rows.typed_data();
  const auto drafted = [&](int64_t b) { return std::min<int64_t>(n_valid.typed_data()[b], n) - 1; };
  // Probabilities are written for so many rows of a sequence before its verdict, by all threads, and for another row when the
  // verdict comes there. A chain's last row is rarely reached, and of a tree's a path; its likeliest node stands first.
  const auto ahead = [&](int64_t b) { return tree ? std::min<int64_t>(drafted(b) + 1, 2) : drafted(b); };
  wanted.clear();
  for (int64_t r = 0; r < count; ++r)
    if (r % n < ahead(r / n)) wanted.push_back(r);
  std::fill_n(alphas->typed_data(), batch * K, 0.0f);
  std::fill_n(nodes->typed_data(), batch * K, -1);
  const auto q_of = [&](int64_t b) { return q.element_count() ? q.typed_data() + b * K * width : nullptr; };
  const auto write_probs = [&, own = probs.data()](int64_t r) {
    if (shapes.count() && !probs_row(rows.typed_data() + r * width, width, shapes.of(r / n), own + r * width))
      std::fill_n(own + r * width, width, 0.0f);
  };
  const auto weigh = [&, at = wanted.data()](int64_t item) {
    const int64_t r = at[item], b = r / n, i = r % n;
    write_probs(r);
    if (whole || tree) return;
    const float* below = q_of(b);
    alphas->typed_data()[b * K + i] =
        alpha(p + r * width, below ? below + i * width : nullptr, tokens.typed_data()[b * K + i], width);
  };
  const auto decide = [&](int64_t b) {
    End end;
    end.token = 0;
    if (drafted(b) >= 0) {
      const Draft c{p + b * n * width, q_of(b), tokens.typed_data() + b * K, tree ? parents.typed_data() + b * K : nullptr,
                    coins.typed_data() + b * K, drafted(b), width, u.typed_data() + b * kUniforms};
      const auto p_of = [&](int64_t i) {
        if (i >= ahead(b)) write_probs(b * n + i);
        return c.p + i * width;
      };
      int32_t* found = nodes->typed_data() + b * K;
      end = whole ? block(c, p_of, found) : reject(c, p_of, found);
    }
    accepted->typed_data()[b] = static_cast<int32_t>(end.accepted), tested->typed_data()[b] = static_cast<int32_t>(end.tested);
    token->typed_data()[b] = std::max(end.token, 0), failed->typed_data()[b] = end.token < 0;
  };
  parallel(wanted.size(), weigh, batch, decide);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    specsparse_judge, judge,
    (results<Ints32, Ints32, Ints32, Ints32, ffi::Buffer<ffi::PRED>, Floats>(
        args<Floats, Floats, Floats, Ints32, Floats, Ints32, Ints32, Ints32, Floats, Floats, Floats>().Attr<int64_t>("whole"))));

#pragma GCC visibility pop

}  // namespace specsparse
