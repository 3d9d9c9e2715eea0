// Attention of query rows over KV blocks. Owns its arithmetic: chunks of 64 tokens at absolute positions, in order,
// with a running maximum and sum, so that a row's result does not depend on the rows beside it.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace millrace {
namespace {

// Keys and values of a chunk as f32: where they are, block by block.
struct Chunk {
  const float* keys[kAttentionChunk / kBlock];    // each [size][16 tokens]
  const float* values[kAttentionChunk / kBlock];  // each [16 tokens][size]
};

inline const float* expand_keys(const KvLayout& layout, const uint8_t* record, float* buffer) {
  switch (layout.type) {
    case KvType::kF32:
      return reinterpret_cast<const float*>(record);
    case KvType::kBf16: {
      const uint16_t* keys = reinterpret_cast<const uint16_t*>(record);
      for (int64_t d = 0; d < layout.padded_size; d += 2) {
        F16 even, odd;
        load_bf16_pairs(keys + d * kBlock, even, odd);
        store(buffer + d * kBlock, even);
        store(buffer + (d + 1) * kBlock, odd);
      }
      return buffer;
    }
    case KvType::kInt8: {
      // A token's scale goes into its keys: 16 tokens lie side by side.
      const F16 scale = load(reinterpret_cast<const float*>(record + layout.scales_offset));
      for (int64_t d = 0; d < layout.padded_size; d += 4) {
        F16 quad[4];
        load_u8_quads(record + d * kBlock, quad);
        for (int j = 0; j < 4; ++j) store(buffer + (d + j) * kBlock, mul(quad[j], scale));
      }
      return buffer;
    }
  }
  return buffer;
}

inline const float* expand_values(const KvLayout& layout, const uint8_t* record, float* buffer) {
  const int64_t size = layout.padded_size;
  switch (layout.type) {
    case KvType::kF32:
      return reinterpret_cast<const float*>(record + layout.values_offset);
    case KvType::kBf16: {
      const uint16_t* values = reinterpret_cast<const uint16_t*>(record + layout.values_offset);
      for (int64_t t = 0; t < kBlock; t += 2) {
        for (int64_t d = 0; d < size; d += 16) {
          F16 even, odd;
          load_bf16_pairs(values + t * size + d * 2, even, odd);
          store(buffer + t * size + d, even);
          store(buffer + (t + 1) * size + d, odd);
        }
      }
      return buffer;
    }
    case KvType::kInt8: {
      const uint8_t* values = record + layout.values_offset;
      const float* scales = reinterpret_cast<const float*>(record + layout.scales_offset) + kBlock;
      for (int64_t t = 0; t < kBlock; t += 4) {
        for (int64_t d = 0; d < size; d += 16) {
          F16 quad[4];
          load_u8_quads(values + t * size + d * 4, quad);
          for (int j = 0; j < 4; ++j) store(buffer + (t + j) * size + d, mul(quad[j], splat(scales[t + j])));
        }
      }
      return buffer;
    }
  }
  return buffer;
}

// Scores of some queries against some blocks of 16 keys.
template <int kRows, int kBlocks>
inline void scores_of(const float* const* keys, const float* queries, int64_t size, float* scores) {
  F16 sums[kRows][kBlocks];
  for (int r = 0; r < kRows; ++r) {
    for (int b = 0; b < kBlocks; ++b) sums[r][b] = splat(0.0f);
  }
  for (int64_t d = 0; d < size; ++d) {
    F16 key[kBlocks];
    for (int b = 0; b < kBlocks; ++b) key[b] = load(keys[b] + d * kBlock);
    for (int r = 0; r < kRows; ++r) {
      const F16 query = splat(queries[r * size + d]);
      for (int b = 0; b < kBlocks; ++b) sums[r][b] = fma(query, key[b], sums[r][b]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int b = 0; b < kBlocks; ++b) store(scores + r * kAttentionChunk + b * kBlock, sums[r][b]);
  }
}

template <int kRows>
inline void chunk_scores(const Chunk& chunk, int64_t first, int64_t last, const float* queries, int64_t size,
                         float* scores) {
  int64_t block = first;
  for (; block + kScoreBlocks <= last; block += kScoreBlocks) {
    scores_of<kRows, kScoreBlocks>(chunk.keys + block, queries, size, scores + block * kBlock);
  }
  for (; block < last; ++block) scores_of<kRows, 1>(chunk.keys + block, queries, size, scores + block * kBlock);
}

// Adds the values of tokens begin..end of a chunk, weighted, to some dims of some outputs; tokens in order.
template <int kRows, int kVectors>
inline void add_values(const Chunk& chunk, int64_t size, int64_t dim, const float* weights, int64_t begin, int64_t end,
                       float* outputs) {
  if (begin >= end) return;
  F16 sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) sums[r][i] = load(outputs + r * size + dim + 16 * i);
  }
  for (int64_t t = begin; t < end; ++t) {
    const float* values = chunk.values[t / kBlock] + t % kBlock * size + dim;
    F16 value[kVectors];
    for (int i = 0; i < kVectors; ++i) value[i] = load(values + 16 * i);
    for (int r = 0; r < kRows; ++r) {
      const F16 weight = splat(weights[r * kAttentionChunk + t]);
      for (int i = 0; i < kVectors; ++i) sums[r][i] = fma(weight, value[i], sums[r][i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) store(outputs + r * size + dim + 16 * i, sums[r][i]);
  }
}

struct Span {
  int64_t begin;
  int64_t end;
};

// What a row sees of a chunk is exact: a token that it does not see is not multiplied by zero but left out, since what
// is there may be anything. Rows that share most of what they see go together over that.
template <int kRows>
inline void add_rows(const Chunk& chunk, int64_t size, const Span* spans, const float* weights, float* outputs) {
  Span common = spans[0];
  for (int r = 1; r < kRows; ++r) {
    common.begin = spans[r].begin > common.begin ? spans[r].begin : common.begin;
    common.end = spans[r].end < common.end ? spans[r].end : common.end;
  }
  auto add_range = [&](int64_t dim, auto vectors) {
    constexpr int kVectors = decltype(vectors)::kCount;
    if (kRows == 1 || common.begin >= common.end) {
      for (int r = 0; r < kRows; ++r) {
        add_values<1, kVectors>(chunk, size, dim, weights + r * kAttentionChunk, spans[r].begin, spans[r].end,
                                outputs + r * size);
      }
      return;
    }
    for (int r = 0; r < kRows; ++r) {
      add_values<1, kVectors>(chunk, size, dim, weights + r * kAttentionChunk, spans[r].begin, common.begin,
                              outputs + r * size);
    }
    add_values<kRows, kVectors>(chunk, size, dim, weights, common.begin, common.end, outputs);
    for (int r = 0; r < kRows; ++r) {
      add_values<1, kVectors>(chunk, size, dim, weights + r * kAttentionChunk, common.end, spans[r].end,
                              outputs + r * size);
    }
  };
  int64_t dim = 0;
  for (; dim + 16 * kValueVectors <= size; dim += 16 * kValueVectors) add_range(dim, Count<kValueVectors>{});
  for (; dim < size; dim += 16) add_range(dim, Count<1>{});
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// One row's scores of a chunk become weights; its output and total fade by what its maximum rose. `seen` is not empty.
inline void soften(const AttentionArgs& args, Span seen, float* scores, float* peak, float* total, float* output,
                   int64_t size) {
  F16 parts[4];
  F16 peaks = splat(*peak);
  for (int j = 0; j < 4; ++j) {
    F16 part = load(scores + 16 * j);
    if (args.softcap > 0.0f) {
      part = mul(splat(args.softcap), hyperbolic_tangent(mul(part, splat(1.0f / args.softcap))));
    }
    // Lanes outside may hold anything, so they are replaced and not computed with.
    parts[j] = keep_lanes(part, static_cast<int>(seen.begin - 16 * j), static_cast<int>(seen.end - 16 * j),
                          splat(kMinusInfinity));
    peaks = maximum(peaks, parts[j]);
  }
  const float new_peak = reduce_max(peaks);
  const F16 shift = splat(new_peak);
  for (int j = 0; j < 4; ++j) {
    parts[j] = exponential(sub(parts[j], shift));
    store(scores + 16 * j, parts[j]);
  }
  const float sum = reduce_add(add(add(parts[0], parts[1]), add(parts[2], parts[3])));
  if (new_peak == *peak) {
    *total += sum;
    return;
  }
  float fade[16];
  store(fade, exponential(sub(splat(*peak), shift)));
  *total = *total * fade[0] + sum;
  *peak = new_peak;
  const F16 faded = splat(fade[0]);
  for (int64_t d = 0; d < size; d += 16) store(output + d, mul(load(output + d), faded));
}

// Softmax-weighted values, chunk by chunk of absolute positions, with a running maximum and sum.
void attend(const AttentionArgs& args) {
  const KvLayout& layout = *args.layout;
  const int64_t size = layout.padded_size;
  const int64_t heads = args.heads_per_kv;
  const int64_t count = args.row_count * heads;
  float* queries = args.scratch;
  float* outputs = queries + count * size;
  float* scores = outputs + count * size;
  float* peaks = scores + count * kAttentionChunk;
  float* totals = peaks + count;
  float* key_buffer = totals + count;
  float* value_buffer = key_buffer + kAttentionChunk * size;

  int64_t begin = args.rows[0].begin;
  int64_t end = args.rows[0].end;
  for (int64_t r = 0; r < args.row_count; ++r) {
    begin = least(begin, args.rows[r].begin);
    end = most(end, args.rows[r].end);
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = args.q + args.rows[r].source * args.q_stride + (args.kv_head * heads + h) * layout.head_size;
      float* query = queries + (r * heads + h) * size;
      for (int64_t d = 0; d < layout.head_size; ++d) query[d] = q[d] * args.scale;
      for (int64_t d = layout.head_size; d < size; ++d) query[d] = 0.0f;
    }
  }
  for (int64_t i = 0; i < count * size; ++i) outputs[i] = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    peaks[i] = kMinusInfinity;
    totals[i] = 0.0f;
  }

  for (int64_t start = begin / kAttentionChunk * kAttentionChunk; start < end; start += kAttentionChunk) {
    const int64_t first = (most(begin, start) - start) / kBlock;
    const int64_t last = (least(end - start, kAttentionChunk) + kBlock - 1) / kBlock;
    Chunk chunk;
    for (int64_t block = first; block < last; ++block) {
      const uint8_t* record = args.layer_base + args.block_table[start / kBlock + block] * layout.block_bytes +
                              args.kv_head * layout.record_bytes;
      chunk.keys[block] = expand_keys(layout, record, key_buffer + block * kBlock * size);
      chunk.values[block] = expand_values(layout, record, value_buffer + block * kBlock * size);
    }
    int64_t i = 0;
    for (; i + kScoreRows <= count; i += kScoreRows) {
      chunk_scores<kScoreRows>(chunk, first, last, queries + i * size, size, scores + i * kAttentionChunk);
    }
    for (; i < count; ++i) {
      chunk_scores<1>(chunk, first, last, queries + i * size, size, scores + i * kAttentionChunk);
    }
    auto seen = [&](int64_t at) {
      const AttentionRow& row = args.rows[at / heads];
      return Span{most(row.begin - start, 0), least(row.end - start, kAttentionChunk)};
    };
    for (i = 0; i < count; ++i) {
      const Span span = seen(i);
      if (span.begin >= span.end) continue;
      soften(args, span, scores + i * kAttentionChunk, peaks + i, totals + i, outputs + i * size, size);
    }
    for (i = 0; i + kValueRows <= count; i += kValueRows) {
      Span spans[kValueRows];
      for (int r = 0; r < kValueRows; ++r) spans[r] = seen(i + r);
      add_rows<kValueRows>(chunk, size, spans, scores + i * kAttentionChunk, outputs + i * size);
    }
    for (; i < count; ++i) {
      const Span span = seen(i);
      add_rows<1>(chunk, size, &span, scores + i * kAttentionChunk, outputs + i * size);
    }
  }

  for (int64_t i = 0; i < count; ++i) {
    float* out = args.out + args.rows[i / heads].target * args.out_stride +
                 (args.kv_head * heads + i % heads) * layout.head_size;
    const float* output = outputs + i * size;
    for (int64_t d = 0; d < layout.head_size; ++d) out[d] = output[d] / totals[i];
  }
}

}  // namespace
}  // namespace millrace
