// Attention by AMX tiles of bf16 pairs: 32 (token, head) rows by 32 keys, or by 32 dims of values, at a time. Replaces
// attend() on AMX machines where KV memory is not f32.
//
// Rounds what the dot products of bf16 pairs round and softens by the same code (see attention_impl.h). The order of
// the sums is the tiles' own, so all rows go by tiles, however few.
//
// Part of a file that is compiled for one instruction set; comes after kernels_impl.h.
#pragma once

#include "kernels_impl.h"
#include "tiles.h"

namespace headrace {
namespace {

constexpr int64_t kTileDepth = 32;  // dims of a key, or tokens of values, that one tile product takes
constexpr int64_t kChunkBlocks = kAttentionChunk / kBlock;

// A block's keys as tiles read them, [depth/2][16 tokens][2]: where they are, or in `buffer`, where codes are widened
// and dims that a tile has more are zero.
inline const uint16_t* tiled_keys(const KvLayout& layout, const uint8_t* record, int64_t depth, uint16_t* buffer) {
  const int64_t size = layout.padded_size;
  const uint16_t* keys = reinterpret_cast<const uint16_t*>(record);
  if (layout.has_scales()) {
    for (int64_t d = 0; d < size; d += 4) {
      F16 quad[4];
      load_quads(layout.type, record, d / 4, quad);
      store_pairs(buffer + d * kBlock, pair_exact(quad[0], quad[1]));
      store_pairs(buffer + (d + 2) * kBlock, pair_exact(quad[2], quad[3]));
    }
  } else if (size == depth) {
    return keys;
  } else {
    for (int64_t i = 0; i < size * kBlock; ++i) buffer[i] = keys[i];
  }
  for (int64_t i = size * kBlock; i < depth * kBlock; ++i) buffer[i] = 0;
  return buffer;
}

// Copies a block's values as tiles read them: [8 token pairs][depth][2]. `keys`: see pair_values().
inline void tile_values(const KvLayout& layout, const uint8_t* record, int64_t depth, float* keys, uint16_t* out) {
  const int64_t size = layout.padded_value_size;
  if (layout.values_in_keys) {
    pair_values(layout, record, depth, keys, out);
  } else if (layout.has_scales()) {
    for (int64_t t = 0; t < kBlock; t += 4) {
      for (int64_t d = 0; d < size; d += 16) {
        F16 quad[4];
        load_quads(layout.type, record + layout.values_offset, value_quad(layout, t, d), quad);
        store_pairs(out + t * depth + d * 2, pair_exact(quad[0], quad[1]));
        store_pairs(out + (t + 2) * depth + d * 2, pair_exact(quad[2], quad[3]));
      }
    }
  } else {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(record + layout.values_offset);
    for (int64_t t = 0; t < kBlock; t += 2) {
      for (int64_t d = 0; d < size * 2; d += 32) store_pairs(out + t * depth + d, load_pairs(values + t * size + d));
    }
  }
  if (size == depth) return;
  for (int64_t t = 0; t < kBlock; t += 2) {
    for (int64_t d = size * 2; d < depth * 2; ++d) out[t * depth + d] = 0;
  }
}

// Zeroes values [32 token pairs][depth][2] of tokens outside `seen`, whatever they are.
inline void forget_unseen(uint16_t* values, int64_t depth, Span seen) {
  for (int64_t t = 0; t < kAttentionChunk; ++t) {
    if (t >= seen.begin && t < seen.end) continue;
    uint16_t* token = values + t / 2 * depth * 2 + t % 2;
    for (int64_t d = 0; d < depth; ++d) token[d * 2] = 0;
  }
}

inline bool has_nonfinite(const uint16_t* values, int64_t count) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= (values[i] & 0x7f80) == 0x7f80;
  return found;
}

// Where a call's rows and a chunk's keys and values lie in its scratch.
struct TiledBuffers {
  TiledBuffers(const AttentionArgs& args, int64_t held, int64_t depth, int64_t value_depth)
      : outputs(args.scratch),
        scores(outputs + held * value_depth),
        key_scales(scores + held * kAttentionChunk),
        value_scales(key_scales + kAttentionChunk),
        queries(reinterpret_cast<uint16_t*>(value_scales + kAttentionChunk)),
        values(queries + held * depth),
        keys(values + kAttentionChunk * value_depth),
        peaks(reinterpret_cast<float*>(keys + kAttentionChunk * depth)),
        totals(peaks + held),
        block_keys(totals + held) {}

  float* const outputs;       // [held][value depth]
  float* const scores;        // [held][64]; over a row's scores its weights
  float* const key_scales;    // [64], where KV memory has scales
  float* const value_scales;  // [64]
  uint16_t* const queries;    // [held][depth]
  uint16_t* const values;     // [32 token pairs][value depth][2]
  uint16_t* const keys;       // [4 blocks][depth/2][16 tokens][2], where they cannot be read from KV memory
  float* const peaks;         // [held]
  float* const totals;        // [held]
  float* const block_keys;    // [depth][16 tokens]
};

// Scores of all rows, `at_once` by tiles, against the chunk's blocks first..last.
template <typename Tiles>
inline void tiled_scores(Tiles& tiles, const TiledBuffers& buffers, const uint16_t* const* keys, int64_t first,
                         int64_t last, int64_t depth, int64_t held, int64_t at_once) {
  for (int64_t block = first / 2 * 2; block < last; block += 2) {
    // A block of the pair that no row needs is computed for nothing.
    const uint16_t* left = keys[most(block, first)];
    const uint16_t* right = keys[least(block + 1, last - 1)];
    for (int64_t row = 0; row < held; row += at_once) {
      tiles.clear();
      for (int64_t d = 0; d < depth; d += kTileDepth) {
        const uint16_t* queries = buffers.queries + row * depth + d;
        tiles.load(left + d * kBlock, right + d * kBlock, kTileBytes, queries, queries + kTileRows * depth, depth * 2);
        tiles.add_bf16();
      }
      tiles.store(buffers.scores + row * kAttentionChunk + block * kBlock, kAttentionChunk * 4);
    }
  }
}

// Adds the chunk's values, weighted, to the outputs of all rows.
template <typename Tiles>
inline void add_tiled_values(Tiles& tiles, const TiledBuffers& buffers, int64_t depth, int64_t held, int64_t at_once) {
  for (int64_t row = 0; row < held; row += at_once) {
    for (int64_t d = 0; d < depth; d += 2 * kTileRows) {
      float* outputs = buffers.outputs + row * depth + d;
      tiles.load_sums(outputs, depth * 4);
      for (int64_t t = 0; t < kAttentionChunk; t += kTileDepth) {
        const uint16_t* values = buffers.values + t * depth + d * 2;
        const uint16_t* weights = weights_of<Twos>(buffers.scores + row * kAttentionChunk) + t;
        const uint16_t* more = weights + kTileRows * kAttentionChunk * 2;
        tiles.load(values, values + 2 * kTileRows, depth * 4, weights, more, kAttentionChunk * 4);
        tiles.add_bf16();
      }
      tiles.store(outputs, depth * 4);
    }
  }
}

// Writes a row's output. A sum of the tiles may be -0 or denormal by what was added for nothing, and is 0 then.
inline void write_attended(const float* output, float total, int64_t size, float* out) {
  for (int64_t d = 0; d < size; d += 16) {
    F16 x = load(output + d);
    x = where_less(absolute(x), splat(1.17549435e-38f), splat(0.0f), x);
    store_some(out + d, size - d, divide(x, splat(total)));
  }
}

template <typename Tiles>
void attend_by_tiles(const AttentionArgs& args) {
  const KvLayout& layout = *args.layout;
  if (layout.type == KvType::kF32) return attend(args);
  const int64_t depth = round_up(layout.padded_size, kTileDepth);
  const int64_t value_depth = round_up(layout.padded_value_size, kTileDepth);
  const int64_t heads = args.heads_per_kv;
  const int64_t count = args.row_count * heads;
  const int64_t at_once = count <= kTileRows ? count : 2 * kTileRows;
  const int64_t held = round_up(count, at_once);  // rows beyond the last are computed for nothing
  const TiledBuffers buffers(args, held, depth, value_depth);

  const float scale = args.scale * Twos::kUnit;
  int64_t begin = args.rows[0].begin;
  int64_t end = args.rows[0].end;
  for (int64_t r = 0; r < args.row_count; ++r) {
    begin = least(begin, args.rows[r].begin);
    end = most(end, args.rows[r].end);
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = args.q + args.rows[r].source * args.q_stride + (args.kv_head * heads + h) * layout.head_size;
      for (int64_t d = 0; d < depth; d += 16) {
        float lanes[16];
        for (int64_t i = 0; i < 16; ++i) lanes[i] = d + i < layout.head_size ? q[d + i] * scale : 0.0f;
        Twos::store_factors(buffers.queries + (r * heads + h) * depth + d, load(lanes));
      }
    }
  }
  for (int64_t i = count * depth; i < held * depth; ++i) buffers.queries[i] = 0;
  for (int64_t i = 0; i < held * value_depth; ++i) buffers.outputs[i] = 0.0f;
  for (int64_t i = 0; i < held; ++i) begin_softmax<Twos>(args, i, buffers.peaks + i, buffers.totals + i);

  Tiles tiles;
  tiles.shape({at_once, kTileBytes});
  for (int64_t start = begin / kAttentionChunk * kAttentionChunk; start < end; start += kAttentionChunk) {
    auto seen_by = [&](int64_t r) {
      const AttentionRow& row = args.rows[r];
      return Span{most(row.begin - start, 0), least(row.end - start, kAttentionChunk)};
    };
    const Span any{most(begin - start, 0), least(end - start, kAttentionChunk)};
    const int64_t first = any.begin / kBlock;
    const int64_t last = (any.end + kBlock - 1) / kBlock;
    Chunk<Twos> chunk;
    if (layout.has_scales()) {
      chunk.key_scales = buffers.key_scales;
      chunk.value_scales = buffers.value_scales;
    }
    for (int64_t block = first; block < last; ++block) {
      const uint8_t* record = args.layer_base + args.block_table[start / kBlock + block] * layout.block_bytes +
                              args.kv_head * layout.record_bytes;
      chunk.keys[block] = tiled_keys(layout, record, depth, buffers.keys + block * kBlock * depth);
      tile_values(layout, record, value_depth, buffers.block_keys, buffers.values + block * kBlock * value_depth);
      if (layout.has_scales()) {
        store(buffers.key_scales + block * kBlock, load_f16(layout.key_scales(record)));
        store(buffers.value_scales + block * kBlock, load_f16(layout.value_scales(record)));
      }
    }
    // A weight of zero leaves out a token only if its value is finite. What no row sees is made so; where one row sees
    // such a value and another does not, each token goes by itself.
    if (any.begin > 0 || any.end < kAttentionChunk) forget_unseen(buffers.values, value_depth, any);
    bool alike = true;
    for (int64_t r = 0; r < args.row_count; ++r) {
      const Span span = seen_by(r);
      alike = alike && span.begin == any.begin && span.end == any.end;
    }
    if (!alike && has_nonfinite(buffers.values, kAttentionChunk * value_depth)) {
      for (int64_t r = 0; r < args.row_count; ++r) {
        AttentionArgs one = args;
        one.rows = args.rows + r;
        one.row_count = 1;
        attend_by_tiles<Tiles>(one);
      }
      return;
    }

    tiled_scores(tiles, buffers, chunk.keys, first, last, depth, held, at_once);
    for (int64_t i = 0; i < count; ++i) {
      const Span span = seen_by(i / heads);
      float* scores = buffers.scores + i * kAttentionChunk;
      if (span.begin < span.end) {
        soften<Twos>(args, chunk, span, bias_of(args, i, start), scores, nullptr, buffers.peaks + i, buffers.totals + i,
                     buffers.outputs + i * value_depth, value_depth);
      } else {
        for (int64_t j = 0; j < kAttentionChunk / 2; j += 16) store(scores + j, splat(0.0f));
      }
    }
    add_tiled_values(tiles, buffers, value_depth, held, at_once);
  }

  for (int64_t i = 0; i < count; ++i) {
    write_attended(buffers.outputs + i * value_depth, buffers.totals[i], layout.value_size,
                   args.out + args.rows[i / heads].target * args.out_stride +
                       (args.kv_head * heads + i % heads) * layout.value_size);
  }
}

}  // namespace
}  // namespace headrace
