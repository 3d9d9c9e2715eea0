// How a model mixes experts: which experts each row goes to, and their products over the rows that chose them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "adapters.h"
#include "model.h"

namespace headrace {

// Leaves out the experts of all groups but the best ones.
void Model::keep_best_groups(float* rank, int64_t count) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t size = count / w_.expert_groups;
  auto group_rank = [&](int64_t group) {
    const float* first = rank + group * size;
    float best = kNone, second = kNone;
    for (int64_t e = 0; e < size; ++e) {
      second = std::max(second, std::min(best, first[e]));
      best = std::max(best, first[e]);
    }
    return w_.group_best == 2 ? best + second : best;
  };
  for (int64_t g = 0; g < w_.expert_groups; ++g) group_rank_[static_cast<size_t>(g)] = group_rank(g);
  for (int64_t g = 0; g < w_.expert_groups; ++g) {
    int64_t better = 0;
    for (int64_t other = 0; other < w_.expert_groups; ++other) {
      const float mine = group_rank_[static_cast<size_t>(g)];
      const float theirs = group_rank_[static_cast<size_t>(other)];
      better += theirs > mine || (theirs == mine && other < g) ? 1 : 0;
    }
    if (better >= w_.top_groups) std::fill(rank + g * size, rank + (g + 1) * size, kNone);
  }
}

// Chooses the top_k experts of a row one by one. A choice's weight is its share of a softmax over those scores left
// that are at most 2 * expert_margin below it, relative to the larger of the two.
void Model::choose_near_best(const float* scores, int64_t count, int64_t row) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  float* left = expert_rank_.data();
  float* near = left + count;
  std::copy(scores, scores + count, left);
  for (int64_t j = 0; j < w_.top_k; ++j) {
    const int64_t best = std::max_element(left, left + count) - left;
    const float top = left[best];
    for (int64_t e = 0; e < count; ++e) {
      const bool far = (top - scores[e]) / std::max(std::fabs(scores[e]), top) > 2.0f * w_.expert_margin;
      near[e] = far ? kNone : left[e];
    }
    kernels_.softmax(near, count);
    expert_of_[static_cast<size_t>(row * w_.top_k + j)] = static_cast<int32_t>(best);
    expert_weight_.data()[row * w_.top_k + j] = near[best];
    left[best] = kNone;
  }
}

// Chooses the top_k experts of each row and their weights.
void Model::weigh_experts(const Layer& layer, int64_t rows) {
  const int64_t count = static_cast<int64_t>(layer.experts.size());
  const int64_t router_stride = pad_row(count);
  multiply(layer.router, normed_.data(), hidden_pad_, rows, router_.data(), router_stride);
  float* rank = expert_rank_.data();
  for (int64_t r = 0; r < rows; ++r) {
    float* weights = router_.data() + r * router_stride;
    if (w_.expert_margin > 0.0f) {
      choose_near_best(weights, count, r);
      continue;
    }
    if (w_.sigmoid_experts) {
      sigmoid(weights, count);
    } else {
      kernels_.softmax(weights, count);
    }
    std::copy(weights, weights + count, rank);
    if (!layer.router_bias.empty()) {
      for (int64_t e = 0; e < count; ++e) rank[e] += layer.router_bias[static_cast<size_t>(e)];
    }
    if (w_.expert_groups > 1) keep_best_groups(rank, count);
    float total = 0.0f;
    for (int64_t j = 0; j < w_.top_k; ++j) {
      int64_t best = 0;
      for (int64_t e = 1; e < count; ++e) best = rank[e] > rank[best] ? e : best;
      expert_of_[static_cast<size_t>(r * w_.top_k + j)] = static_cast<int32_t>(best);
      expert_weight_.data()[r * w_.top_k + j] = weights[best];
      total += weights[best];
      rank[best] = -std::numeric_limits<float>::infinity();
    }
    for (int64_t j = 0; j < w_.top_k; ++j) {
      float& weight = expert_weight_.data()[r * w_.top_k + j];
      if (w_.normalise_experts) weight /= total;
      if (!layer.expert_scales.empty()) {
        weight *= layer.expert_scales[static_cast<size_t>(expert_of_[static_cast<size_t>(r * w_.top_k + j)])];
      }
      if (w_.expert_scale != 1.0f) weight *= w_.expert_scale;
    }
  }
}

// 1 / (1 + exp(-x)), from the kernels' tanh, so that it has the same bits in every instruction set.
void Model::sigmoid(float* values, int64_t count) const {
  kernels_.softcap(values, count, 2.0f);
  for (int64_t i = 0; i < count; ++i) values[i] = 0.5f + 0.25f * values[i];
}

// Adds the output of the expert that every row goes to.
void Model::add_shared(const Layer& layer, int64_t rows) {
  const int64_t gate_stride = pad_row(static_cast<int64_t>(layer.experts.size()));
  if (layer.shared_gate.present()) {
    multiply(layer.shared_gate, normed_.data(), hidden_pad_, rows, router_.data(), gate_stride);
  }
  fit_rows(rows, normed_.data(), hidden_pad_, w_.hidden, layer.shared.up);
  const Opening opening = opening_of(w_.shared_inner);
  multiply(layer.shared.up, normed_.data(), hidden_pad_, rows, inner_.data(), inner_pad_, &opening);
  times_.end(Stage::kUp);
  fit_rows(rows, inner_.data(), inner_pad_, w_.shared_inner, layer.shared.down);
  multiply(layer.shared.down, inner_.data(), inner_pad_, rows, expert_out_.data(), hidden_pad_);
  times_.end(Stage::kDown);
  pool_.run(rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float weight = 1.0f;
      if (layer.shared_gate.present()) {
        weight = router_.data()[r * gate_stride];
        sigmoid(&weight, 1);
      }
      float* out = joined_.data() + r * hidden_pad_;
      const float* in = expert_out_.data() + r * hidden_pad_;
      for (int64_t i = 0; i < w_.hidden; ++i) out[i] += weight * in[i];
    }
  });
}

// Each row of normed_ goes to its top_k experts; rows are brought together by expert, and joined again in the row's own
// order.
void Model::mix_experts(const Layer& layer, int64_t rows) {
  const int64_t count = static_cast<int64_t>(layer.experts.size());
  const int64_t slots = rows * w_.top_k;
  std::fill(expert_begin_.begin(), expert_begin_.begin() + count + 1, 0);
  for (int64_t i = 0; i < slots; ++i) ++expert_begin_[static_cast<size_t>(expert_of_[static_cast<size_t>(i)]) + 1];
  for (int64_t e = 0; e < count; ++e)
    expert_begin_[static_cast<size_t>(e) + 1] += expert_begin_[static_cast<size_t>(e)];
  for (int64_t i = 0; i < slots; ++i) {
    const size_t expert = static_cast<size_t>(expert_of_[static_cast<size_t>(i)]);
    const int64_t at = expert_begin_[expert]++;
    expert_order_[static_cast<size_t>(at)] = static_cast<int32_t>(i);
    expert_slot_[static_cast<size_t>(i)] = static_cast<int32_t>(at);
  }
  for (int64_t e = count; e > 0; --e) expert_begin_[static_cast<size_t>(e)] = expert_begin_[static_cast<size_t>(e) - 1];
  expert_begin_[0] = 0;

  auto expert_at = [&](int64_t at) { return expert_of_[static_cast<size_t>(expert_order_[static_cast<size_t>(at)])]; };
  pool_.run(slots, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t r = expert_order_[static_cast<size_t>(at)] / w_.top_k;
      float* in = expert_in_.data() + at * hidden_pad_;
      std::memcpy(in, normed_.data() + r * hidden_pad_, static_cast<size_t>(w_.hidden) * sizeof(float));
      if (w_.scales_inputs) {
        const float weight = expert_weight_.data()[expert_order_[static_cast<size_t>(at)]];
        for (int64_t i = 0; i < w_.hidden; ++i) in[i] *= weight;
      }
      const Product& up = layer.experts[static_cast<size_t>(expert_at(at))].up;
      if (changes_rows(up)) fit_row(in, w_.hidden, up, at, 0, false);
    }
  });

  times_.end(Stage::kRoute);
  QuantisedRows codes = quantised();
  auto multiply_experts = [&](auto product_of, const float* in, int64_t in_stride, float* out, int64_t out_stride,
                              const Opening* opening) {
    multiply_several(count, product_of(layer.experts.front()), opening, [&](int64_t expert) {
      const size_t e = static_cast<size_t>(expert);
      const Product& product = product_of(layer.experts[e]);
      ProductArgs args;
      args.weights = &product.weights;
      args.rows = in;
      args.rows_stride = in_stride;
      args.quantised = &codes;
      args.first_row = expert_begin_[e];
      args.row_count = expert_begin_[e + 1] - expert_begin_[e];
      args.bias = product.bias.data();
      args.out = out + args.first_row * out_stride;
      args.out_stride = out_stride;
      return args;
    });
  };
  const Opening opening = opening_of(w_.expert_inner);
  multiply_experts([](const Mlp& mlp) -> const Product& { return mlp.up; }, expert_in_.data(), hidden_pad_,
                   inner_.data(), inner_pad_, &opening);
  times_.end(Stage::kUp);
  pool_.run(slots, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) {
      const Product& down = layer.experts[static_cast<size_t>(expert_at(at))].down;
      if (changes_rows(down)) fit_row(inner_.data() + at * inner_pad_, w_.expert_inner, down, at, 0, false);
    }
  });
  times_.end(Stage::kPrepare);
  multiply_experts([](const Mlp& mlp) -> const Product& { return mlp.down; }, inner_.data(), inner_pad_,
                   expert_out_.data(), hidden_pad_, nullptr);
  times_.end(Stage::kDown);
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* out = joined_.data() + r * hidden_pad_;
      for (int64_t i = 0; i < w_.hidden; ++i) out[i] = 0.0f;
      for (int64_t j = 0; j < w_.top_k; ++j) {
        const int64_t slot = r * w_.top_k + j;
        const float weight = w_.scales_inputs ? 1.0f : expert_weight_.data()[slot];
        const float* in = expert_out_.data() + expert_slot_[static_cast<size_t>(slot)] * hidden_pad_;
        for (int64_t i = 0; i < w_.hidden; ++i) out[i] += weight * in[i];
      }
    }
  });
  if (layer.shared.up.present()) add_shared(layer, rows);
}

void Model::norm_joined(int64_t rows, const NormWeights& norm) {
  pool_.run(rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = joined_.data() + r * hidden_pad_;
      kernels_.norm({norm.weight.data(), norm.bias.data(), w_.eps, w_.layer_norm}, row, w_.hidden, row);
    }
  });
}

// joined_ <- the dense MLP and the experts of a layer that has both: each reads the residual through a norm of its own.
void Model::feed_beside(const StepArgs& args, const Layer& layer, int64_t rows) {
  prepare(rows, layer.mlp_norm, layer.mlp.up, low_rank(args, layer, Site::kUp, rows));
  times_.end(Stage::kPrepare);
  feed_forward(args, layer, rows);
  norm_joined(rows, layer.dense_out_norm);
  std::swap(joined_, attention_out_);
  prepare(rows, layer.router_norm, layer.router);
  weigh_experts(layer, rows);
  prepare(rows, layer.experts_norm, Product{});
  mix_experts(layer, rows);
  norm_joined(rows, layer.experts_out_norm);
  pool_.run(rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* dense = attention_out_.data() + r * hidden_pad_;
      float* out = joined_.data() + r * hidden_pad_;
      for (int64_t i = 0; i < w_.hidden; ++i) out[i] = dense[i] + out[i];
    }
  });
}

}  // namespace headrace
