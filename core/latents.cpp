// How a model attends through latents: rows of latents become those of queries, keys and values, as attention.cpp takes
// them, and what heads have attended to becomes their values. Owns products by head.
#include <cstring>

#include "model.h"

namespace headrace {

// raised_ <- some of what rows of latents hold, normed. A norm reads whole vectors of lanes, so it runs on a copy that
// is zero beyond its width.
void Model::norm_latents(const NormWeights& norm, int64_t begin, int64_t width, int64_t rows) {
  constexpr float kEps = 1e-6f;  // of the latents' norms, whatever that of others is
  const int64_t stride = pad_row(width);
  pool_.run(rows, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t r = first; r < last; ++r) {
      float* row = raised_.data() + r * stride;
      std::memcpy(row, latents_.data() + r * latents_pad_ + begin, static_cast<size_t>(width) * sizeof(float));
      std::memset(row + width, 0, static_cast<size_t>(stride - width) * sizeof(float));
      kernels_.norm({norm.weight.data(), nullptr, kEps, false}, row, width, row);
    }
  });
}

void Model::raise(const NormWeights& norm, const Product& up, int64_t begin, int64_t width, int64_t rows, float* out,
                  int64_t out_stride) {
  norm_latents(norm, begin, width, rows);
  fit_rows(rows, raised_.data(), pad_row(width), width, up);
  multiply(up, raised_.data(), pad_row(width), rows, out, out_stride);
  times_.end(Stage::kQkv);
}

// Rows of latents become those of queries, keys and values in qkv_, as a model without latents has them.
void Model::expand_latents(const Layer& layer, int64_t rows) {
  const int64_t size = w_.head_size;
  const int64_t plain = size - w_.turning;  // dims of a key that do not turn
  const int64_t q_size = w_.heads * size;
  const int64_t queries = w_.query_latent > 0 ? w_.query_latent : q_size;
  if (w_.query_latent > 0) raise(layer.q_latent_norm, layer.q_up, 0, queries, rows, qkv_.data(), qkv_pad_);
  raise(layer.kv_latent_norm, layer.kv_up, queries + w_.turning, w_.latent, rows, expanded_.data(), expanded_pad_);
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* latents = latents_.data() + r * latents_pad_;
      const float* expanded = expanded_.data() + r * expanded_pad_;
      float* q = qkv_.data() + r * qkv_pad_;
      float* k = q + q_size;
      float* v = k + q_size;
      if (w_.query_latent == 0) std::memcpy(q, latents, static_cast<size_t>(q_size) * sizeof(float));
      for (int64_t h = 0; h < w_.heads; ++h, k += size, v += w_.value_size, expanded += plain + w_.value_size) {
        std::memcpy(k, latents + queries, static_cast<size_t>(w_.turning) * sizeof(float));
        std::memcpy(k + w_.turning, expanded, static_cast<size_t>(plain) * sizeof(float));
        std::memcpy(v, expanded + plain, static_cast<size_t>(w_.value_size) * sizeof(float));
      }
    }
  });
}

// The same for a layer whose KV memory keeps the latent: queries as they meet it, and one key, whose last dims are the
// value.
void Model::place_latents(const Layer& layer, int64_t rows) {
  const int64_t size = w_.head_size;
  const int64_t plain = size - w_.turning;
  const int64_t q_size = w_.heads * size;
  const int64_t queries = w_.query_latent > 0 ? w_.query_latent : q_size;
  const float* heads = latents_.data();
  int64_t stride = latents_pad_;
  if (w_.query_latent > 0) {
    raise(layer.q_latent_norm, layer.q_up, 0, queries, rows, expanded_.data(), expanded_pad_);
    heads = expanded_.data();
    stride = expanded_pad_;
  }
  norm_latents(layer.kv_latent_norm, queries + w_.turning, w_.latent, rows);
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    const size_t turning = static_cast<size_t>(w_.turning) * sizeof(float);
    for (int64_t r = begin; r < end; ++r) {
      float* q = qkv_.data() + r * qkv_pad_;
      float* k = q + w_.heads * layer.head_size;
      const float* normed = raised_.data() + r * pad_row(w_.latent);
      std::memcpy(k, latents_.data() + r * latents_pad_ + queries, turning);
      std::memcpy(k + w_.turning, normed, static_cast<size_t>(w_.latent) * sizeof(float));
      for (int64_t h = 0; h < w_.heads; ++h) {
        const float* head = heads + r * stride + h * size;
        std::memcpy(q + h * layer.head_size, head, turning);
        place_head(layer.q_to_latent[static_cast<size_t>(h)], h * rows + r, head + w_.turning, plain);
      }
    }
  });
  times_.end(Stage::kPrepare);
  multiply_heads(layer.q_to_latent, rows, qkv_.data() + w_.turning, layer.head_size, qkv_pad_);
  times_.end(Stage::kQkv);
}

// expanded_ <- the values of all heads, from the latents in attended_.
void Model::raise_values(const Layer& layer, int64_t rows) {
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < w_.heads; ++h) {
        const float* attended = attended_.data() + r * q_pad_ + h * w_.latent;
        place_head(layer.v_from_latent[static_cast<size_t>(h)], h * rows + r, attended, w_.latent);
      }
    }
  });
  multiply_heads(layer.v_from_latent, rows, expanded_.data(), w_.value_size, expanded_pad_);
}

// Row `at` of head_rows_, as the product of its head takes it.
void Model::place_head(const Product& product, int64_t at, const float* values, int64_t width) {
  const Layout& layout = product.weights.layout;
  float* row = head_rows_.data() + at * head_pad_;
  std::memcpy(row, values, static_cast<size_t>(width) * sizeof(float));
  std::memset(row + width, 0, static_cast<size_t>(pad_row(width) - width) * sizeof(float));
  if (product.rotation != nullptr) kernels_.rotate(product.rotation->view(), row);
  if (!takes_codes(kernels_, layout)) return;
  kernels_.quantise_row(row, width, layout, head_codes_.data() + at * head_code_stride_,
                        head_scales_.data() + at * head_group_stride_, head_sums_.data() + at * head_group_stride_);
}

// Each head's rows by its own weights.
void Model::multiply_heads(const std::vector<Product>& products, int64_t rows, float* out, int64_t head_stride,
                           int64_t out_stride) {
  const QuantisedRows codes{head_codes_.data(), head_scales_.data(), head_sums_.data(), head_code_stride_,
                            head_group_stride_};
  multiply_several(w_.heads, products.front(), nullptr, [&](int64_t head) {
    ProductArgs args;
    args.weights = &products[static_cast<size_t>(head)].weights;
    args.rows = head_rows_.data();
    args.rows_stride = head_pad_;
    args.quantised = &codes;
    args.first_row = head * rows;
    args.row_count = rows;
    args.out = out + head * head_stride;
    args.out_stride = out_stride;
    return args;
  });
}

}  // namespace headrace
