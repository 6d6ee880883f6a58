// Verdicts on chains by rejection and by block verification, with the definitions of speculative/verifiers: p is the target's
// distribution at a row, q the one that its token was drawn from.
#include <algorithm>
#include <vector>

#include "pool/pool.h"
#include "sampling/rows.h"
#include "simd/ops.h"

namespace ffi = xla::ffi;

namespace specsparse {
namespace {

// The draft of one sequence, the distributions of its rows, and its uniforms.
struct Chain {
  const float* p;         // [count + 1, width]
  const float* q;         // [count, width], or null: 1 at the token
  const int32_t* tokens;  // [count]
  const float* coins;     // [count]
  int64_t count, width;
  const float* u;  // [kUniforms]

  bool known(int64_t i) const { return tokens[i] >= 0 && tokens[i] < width; }
  float q_at(int64_t i) const { return !known(i) ? 0.0f : q ? q[i * width + tokens[i]] : 1.0f; }

  // p/q at token i, 0 where q has none of it.
  float ratio(int64_t i) const {
    const float below = q_at(i);
    return below > 0.0f ? p[i * width + tokens[i]] / below : 0.0f;
  }
};

// The end of an accepted path.
struct End {
  int64_t accepted = 0;
  float weight = 1.0f;
};

float cap(float a) { return a > 1.0f ? 1.0f : a; }  // NaN stays NaN

// row->e = max(0, weight * p - q) at row i of the chain.
void gap(const Chain& c, int64_t i, float weight, Row* row) {
  row->make_room(c.width);
  const float *p = c.p + i * c.width, *q = c.q ? c.q + i * c.width : nullptr;
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

// `Rejection`: node by node, min(1, p/q).
End reject(const Chain& c) {
  End end;
  while (end.accepted < c.count && c.coins[end.accepted] < cap(c.ratio(end.accepted))) ++end.accepted;
  return end;
}

// `Block`: the whole draft together.
End block(const Chain& c, Row* row) {
  End end;
  float weight = 1.0f;
  for (int64_t i = 0; i < c.count; ++i) {
    weight = cap(weight * c.ratio(i));
    if (!(weight > 0.0f)) break;  // it stays so, and no coin is under what follows
    float h = weight;
    if (i + 1 < c.count) {
      gap(c, i + 1, weight, row);
      const float s = mass(row), all = s + (1.0f - weight);
      h = all > 0.0f ? s / all : 0.0f;
    }
    if (c.coins[i] < h) end = {i + 1, weight};
  }
  return end;
}

// The token after the accepted ones: from p if they are all, else from norm(max(0, weight * p - q)), or from weight * p if that
// has no mass or may not be used; -1 if there is no distribution.
int32_t last(const Chain& c, const End& end, bool usable, Row* row) {
  const int64_t i = end.accepted;
  const float* p = c.p + i * c.width;
  if (i < c.count) {
    gap(c, i, end.weight, row);
    const float left = mass(row);
    float* e = row->e.data();
    if (left > 0.0f && usable) {
      for (int64_t v = 0; v < c.width; ++v) e[v] = e[v] / left;
    } else {
      for (int64_t v = 0; v < c.width; ++v) e[v] = end.weight * p[v];
    }
  } else {
    row->make_room(c.width);
    std::copy_n(p, c.width, row->e.data());
  }
  const float total = mass(row);
  if (!(total > 0.0f) || !(total < std::numeric_limits<float>::infinity())) return -1;
  float* e = row->e.data();
  for (int64_t v = 0; v < c.width; ++v) e[v] = e[v] > 0.0f ? e[v] : 0.0f;
  return draw_from(row, c.u);
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
// rows are probabilities then, and otherwise logits. With `whole` by `Block`, without by `Rejection`, which has alphas.
ffi::Error judge(Floats rows, Floats temperature, Floats log_min_p, Ints32 top_k, Floats top_p, Ints32 n_valid, Ints32 tokens,
                 Floats q, Floats coins, Floats u, int64_t whole, ffi::ResultBuffer<ffi::S32> accepted,
                 ffi::ResultBuffer<ffi::S32> token, ffi::ResultBuffer<ffi::PRED> failed, ffi::ResultBuffer<ffi::F32> alphas) {
  const int64_t count = rows.dimensions()[0], width = rows.dimensions()[1], batch = n_valid.element_count();
  const int64_t n = batch ? count / batch : 0, nodes = n - 1;
  const Shapes shapes{temperature, log_min_p, top_k, top_p};
  const auto is = [](const auto& buffer, int64_t wanted) { return static_cast<int64_t>(buffer.element_count()) == wanted; };
  if (!batch) return ffi::Error::Success();
  if (batch * n != count || (shapes.count() && shapes.count() != batch) || !is(tokens, batch * nodes) ||
      !is(coins, batch * nodes) || !is(u, batch * kUniforms) || (q.element_count() && !is(q, batch * nodes * width)))
    return ffi::Error::InvalidArgument("specsparse judge: rows, drafts and uniforms do not go together");
  thread_local std::vector<float> probs;
  thread_local std::vector<int64_t> wanted;
  if (shapes.count()) probs.resize(count * width);
  const float* p = shapes.count() ? probs.data() : rows.typed_data();
  // The row after a whole draft is rarely reached, so its probabilities wait until it is.
  const auto drafted = [&](int64_t b) { return std::min<int64_t>(n_valid.typed_data()[b], n) - 1; };
  wanted.clear();
  for (int64_t r = 0; r < count; ++r)
    if (r % n < drafted(r / n)) wanted.push_back(r);
  std::fill_n(alphas->typed_data(), batch * nodes, 0.0f);
  const auto q_of = [&](int64_t b, int64_t i) -> const float* {
    return q.element_count() ? q.typed_data() + (b * nodes + i) * width : nullptr;
  };
  const auto write_probs = [&, own = probs.data()](int64_t r) {
    if (shapes.count() && !probs_row(rows.typed_data() + r * width, width, shapes.of(r / n), own + r * width))
      std::fill_n(own + r * width, width, 0.0f);
  };
  const auto weigh = [&, at = wanted.data()](int64_t item) {
    const int64_t r = at[item], b = r / n, i = r % n;
    write_probs(r);
    if (!whole)
      alphas->typed_data()[b * nodes + i] = alpha(p + r * width, q_of(b, i), tokens.typed_data()[b * nodes + i], width);
  };
  const auto decide = [&](int64_t b) {
    thread_local Row row;
    accepted->typed_data()[b] = 0, token->typed_data()[b] = 0, failed->typed_data()[b] = false;
    if (drafted(b) < 0) return;
    const Chain c{p + b * n * width, q_of(b, 0), tokens.typed_data() + b * nodes, coins.typed_data() + b * nodes,
                  drafted(b), width, u.typed_data() + b * kUniforms};
    const End end = whole ? block(c, &row) : reject(c);
    if (end.accepted == c.count) write_probs(b * n + end.accepted);
    // A token that q could not have drawn leaves p owed in full.
    const bool usable = whole || end.accepted == c.count || c.q_at(end.accepted) > 0.0f;
    const int32_t found = last(c, end, usable, &row);
    accepted->typed_data()[b] = static_cast<int32_t>(end.accepted);
    token->typed_data()[b] = std::max(found, 0), failed->typed_data()[b] = found < 0;
  };
  parallel(wanted.size(), weigh, batch, decide);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    specsparse_judge, judge,
    (results<Ints32, Ints32, ffi::Buffer<ffi::PRED>, Floats>(
        args<Floats, Floats, Floats, Ints32, Floats, Ints32, Ints32, Floats, Floats, Floats>().Attr<int64_t>("whole"))));

#pragma GCC visibility pop

}  // namespace specsparse
