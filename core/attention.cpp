// How a model attends: rows of queries, keys and values become heads, keys and values go to the KV memory, and heads
// attend to it. Which rows and heads go to which kernel; the kernels are in attention_impl.h.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "adapters.h"
#include "model.h"

namespace headrace {

// Norms and rotates queries and keys in place, and stores keys and values into their blocks.
void Model::split_heads(const StepArgs& args, const Layer& layer, int64_t index) {
  const KvLayout& layout = args.kv->layout(index);
  const int64_t size = layer.head_size;
  const int64_t value_size = layer.value_size;
  const int64_t q_size = w_.heads * size;
  const int64_t kv_size = layer.kv_heads * size;
  const int64_t kv_heads = layer.shares ? 0 : layer.kv_heads;  // that the layer computes
  const int64_t table = std::max(layer.rope, 0) * max_rows_ * half_pad_;
  pool_.run(args.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    float* scratch = row_scratch_.data() + thread * row_scratch_stride_;
    // A norm reads whole vectors of lanes, so it runs on a copy that is zero beyond its width.
    const bool layer_norm = w_.qk_norm == QkNorm::kEachHead;
    auto normalise = [&](const NormWeights& norm, float* values, int64_t width, int64_t first_weight = 0) {
      const int64_t padded = round_up(width, 16);
      std::memcpy(scratch, values, static_cast<size_t>(width) * sizeof(float));
      for (int64_t i = width; i < padded; ++i) scratch[i] = 0.0f;
      const float* bias = norm.bias.data();
      kernels_.norm({norm.weight.data() + first_weight, bias, w_.eps, layer_norm}, scratch, width, scratch);
      std::memcpy(values, scratch, static_cast<size_t>(width) * sizeof(float));
    };
    for (int64_t r = begin; r < end; ++r) {
      const Row& row = row_[static_cast<size_t>(r)];
      float* q = qkv_.data() + r * qkv_pad_;
      float* k = q + q_size;
      float* v = k + kv_size;
      if (!layer.q_norm.present()) {
        // nothing to normalise
      } else if (w_.qk_norm == QkNorm::kFull) {
        normalise(layer.q_norm, q, q_size);
        if (!layer.shares) normalise(layer.k_norm, k, kv_size);
      } else if (w_.qk_norm == QkNorm::kHead) {
        for (int64_t h = 0; h < w_.heads; ++h) normalise(layer.q_norm, q + h * size, size);
        for (int64_t h = 0; h < kv_heads; ++h) normalise(layer.k_norm, k + h * size, size);
      } else if (w_.qk_norm == QkNorm::kEachHead) {
        for (int64_t h = 0; h < w_.heads; ++h) normalise(layer.q_norm, q + h * size, size, h * size);
        for (int64_t h = 0; h < kv_heads; ++h) normalise(layer.k_norm, k + h * size, size, h * size);
      }
      if (layer.v_norm.present()) {
        for (int64_t h = 0; h < kv_heads; ++h) normalise(layer.v_norm, v + h * value_size, value_size);
      }
      if (layer.rope >= 0) {
        const Rope& rope = w_.ropes[static_cast<size_t>(layer.rope)];
        const int64_t half = static_cast<int64_t>(rope.inv_freq[args.rope_variants[row.sequence]].size());
        const float* cosine = cosines_.data() + table + r * half_pad_;
        const float* sine = sines_.data() + table + r * half_pad_;
        for (int64_t h = 0; h < w_.heads + kv_heads; ++h) {  // keys follow queries
          float* x = q + h * size;
          for (int64_t d = 0; d < half; ++d) {
            const float first = x[d];
            const float second = x[d + half];
            x[d] = first * cosine[d] - second * sine[d];
            x[d + half] = second * cosine[d] + first * sine[d];
          }
        }
      }
      if (layer.grows) {
        const float steps =
            std::floor(static_cast<float>(row.position + w_.growth_first) / static_cast<float>(w_.growth_tokens));
        const float factor = std::log1p(steps) * w_.growth + 1.0f;
        for (int64_t i = 0; i < q_size; ++i) q[i] *= factor;
      }
      for (size_t i = 0; i < layer.key_offsets.size(); ++i) k[i] -= layer.key_offsets[i];
      if (layout.rotated) {
        for (int64_t h = 0; h < w_.heads + kv_heads; ++h) {
          float* x = q + h * size;
          kernels_.rotate(layer.key_rotation->view(), x);
          if (layout.values_in_keys) kernels_.rotate(layer.value_rotation->view(), x + layout.first_value());
        }
        for (int64_t h = 0; h < kv_heads && !layout.values_in_keys; ++h) {
          kernels_.rotate(layer.value_rotation->view(), v + h * value_size);
        }
      }
      const int32_t block = args.block_tables[row.sequence * args.table_stride + row.position / kBlock];
      for (int64_t h = 0; h < kv_heads; ++h) {
        write_token(layout, args.kv->record(index, block, h), row.position % kBlock, k + h * size, v + h * value_size);
      }
    }
  });
}

void Model::attention(const StepArgs& args, const Layer& layer, int64_t index, int64_t rows) {
  // Query heads of one KV head are shared out where they are too many for one call, or items too few for all threads.
  const int64_t kv_heads = layer.kv_heads;
  const int64_t sharing = w_.heads / kv_heads;
  const int64_t wanted = (pool_.threads() + rows * kv_heads - 1) / (rows * kv_heads);
  const int64_t heads = std::min(kMostHeads, (sharing + wanted - 1) / wanted);  // of a call
  const int64_t parts = (sharing + heads - 1) / heads;
  const int64_t tile = std::max<int64_t>(1, tile_rows_ / heads);
  for (int64_t r = 0; r < rows; ++r) {
    AttentionRow& asking = asking_[static_cast<size_t>(r)];
    const Row& row = row_[static_cast<size_t>(asking.source)];
    const int64_t fresh = int64_t{args.offsets[row.sequence + 1]} - args.offsets[row.sequence];
    asking.target = r;
    asking.position = row.position;
    asking.begin = 0;
    asking.end = w_.causal ? asking.position + 1 : args.computed[row.sequence] + fresh;
    if (layer.chunk > 0) asking.begin = asking.position / layer.chunk * layer.chunk;
    if (layer.window > 0) {
      asking.begin = std::max<int64_t>(0, asking.position + 1 - layer.window);
      asking.end = std::min(asking.end, asking.position + layer.window);
    }
    if (args.spans == nullptr) continue;
    const int32_t* span = args.spans + asking.source * 2;
    if (layer.spans == Spans::kReach) asking.end = std::max<int64_t>(asking.end, span[1]);
    if (layer.spans == Spans::kOnly) {
      asking.begin = span[0];
      asking.end = span[1];
    }
  }
  // An item is a run of up to `tile` rows and some heads; a run stops where the sequence does, so some items are empty.
  const int64_t calls = kv_heads * parts;  // for one run
  pool_.run(rows * calls, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / calls;
      auto sequence_of = [&](int64_t r) {
        return row_[static_cast<size_t>(asking_[static_cast<size_t>(r)].source)].sequence;
      };
      const int32_t sequence = sequence_of(first);
      int64_t start = first;  // of this sequence's rows
      start = std::lower_bound(asking_.begin(), asking_.begin() + first, sequence,
                               [&](const AttentionRow& row, int32_t s) {
                                 return row_[static_cast<size_t>(row.source)].sequence < s;
                               }) -
              asking_.begin();
      if ((first - start) % tile != 0) continue;
      int64_t count = 1;
      while (count < tile && first + count < rows && sequence_of(first + count) == sequence) ++count;
      AttentionArgs call;
      call.rows = asking_.data() + first;
      call.row_count = count;
      call.q_stride = qkv_pad_;
      call.out_stride = q_pad_;
      const int64_t part = item % calls % parts;
      const int64_t kv_head = item % calls / parts;
      const int64_t first_head = kv_head * sharing + part * heads;
      // The kernel sees the heads of this call alone.
      call.q = qkv_.data() + first_head * layer.head_size;
      call.out = attended_.data() + first_head * layer.value_size;
      call.kv_head = 0;
      call.heads_per_kv = std::min(heads, sharing - part * heads);
      call.scale = w_.attention_scale;
      call.softcap = w_.attention_softcap;
      call.bias = bias_.empty() ? nullptr : bias_.data() + first_head * bias_stride_;
      call.bias_stride = bias_stride_;
      call.bias_reach = bias_reach_;
      call.sinks = layer.sinks.empty() ? nullptr : layer.sinks.data() + first_head;
      call.layout = &args.kv->layout(index);
      call.layer_base = args.kv->record(index, 0, kv_head);
      call.block_table = args.block_tables + sequence * args.table_stride;
      call.scratch = attention_scratch_.data() + thread * attention_stride_;
      kernels_.attend(call);
      if (!call.layout->rotated) continue;
      for (int64_t r = first; r < first + count; ++r) {
        float* head = call.out + r * q_pad_;
        for (int64_t h = 0; h < call.heads_per_kv; ++h) {  // back
          kernels_.rotate(layer.value_rotation->view(), head + h * layer.value_size);
        }
      }
    }
  });
  float* attended = attended_.data();
  int64_t stride = q_pad_, width = w_.heads * layer.value_size;
  if (w_.keeps_latent) {
    times_.end(Stage::kAttention);
    raise_values(layer, rows);
    attended = expanded_.data();
    stride = expanded_pad_;
    width = w_.heads * w_.value_size;
  }
  clear_beyond(attended, stride, rows, width);
  if (w_.attention_gate) gate_attention(layer, rows);
  times_.end(w_.keeps_latent ? Stage::kOutput : Stage::kAttention);
  const LowRank* low = low_rank(args, layer, Site::kOutput, rows);
  fit_rows(rows, attended, stride, width, layer.o, low);
  multiply(layer.o, attended, stride, rows, joined_.data(), hidden_pad_, nullptr, nullptr, low);
  times_.end(Stage::kOutput);
}

}  // namespace headrace
