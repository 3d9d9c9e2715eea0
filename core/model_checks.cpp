// What a model and a step must be before anything is computed: sizes, shapes and places. Owns the refusals of Model;
// what is checked here is trusted everywhere else in the core.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "model.h"

namespace headrace {
namespace {

[[noreturn]] void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

}  // namespace

void Model::check_weights() const {
  if (max_rows_ < 1 || max_rows_ > 65536) refuse("max_rows must be 1 to 65536, not " + std::to_string(max_rows_));
  auto within = [](const char* what, int64_t value, int64_t most) {
    if (value < 1 || value > most) refuse(std::string(what) + " out of range: " + std::to_string(value));
  };
  within("vocab", w_.vocab, int64_t{1} << 24);
  within("hidden", w_.hidden, kMaxInputs);
  within("heads", w_.heads, 4096);
  within("kv_heads", w_.kv_heads, 4096);
  within("head_size", w_.head_size, 1024);
  within("layers", static_cast<int64_t>(w_.layers.size()), 4096);
  if (w_.inner < 0 || w_.inner > kMaxInputs) refuse("inner out of range: " + std::to_string(w_.inner));
  if (w_.expert_inner < 0 || w_.expert_inner > kMaxInputs) {
    refuse("expert_inner out of range: " + std::to_string(w_.expert_inner));
  }
  if (w_.latent < 0 || w_.latent > kMaxInputs || w_.query_latent < 0 || w_.query_latent > kMaxInputs ||
      w_.turning < 0 || w_.turning > w_.head_size || w_.value_size < 1 || w_.value_size > w_.head_size) {
    refuse("the sizes of latents are out of range");
  }
  if (w_.latent == 0 ? w_.query_latent != 0 || w_.turning != 0 || w_.value_size != w_.head_size
                     : w_.kv_heads != w_.heads) {
    refuse("latents need a key head for each head, and models without them have none of their sizes");
  }
  if (w_.keeps_latent && (w_.latent == 0 || w_.turning == w_.head_size || !w_.causal || w_.attention_gate)) {
    refuse("the KV memory cannot keep the latent of this model");
  }
  if (w_.feature_layers < 0 || w_.feature_layers > 64) refuse("feature_layers out of range");
  if (w_.growth_tokens < 1) refuse("growth or chunks are out of range");
  if (w_.expert_groups < 1 || w_.top_groups < 1 || w_.top_groups > w_.expert_groups || w_.expert_groups > 4096 ||
      (w_.group_best != 1 && w_.group_best != 2)) {
    refuse("the groups of experts are out of range");
  }
  if (w_.activation == Activation::kClampedSilu && !w_.gated) refuse("the activation clamped_silu needs gates");
  auto shaped = [](const Product& product, int64_t outputs, int64_t inputs, const std::string& name) {
    const Layout& layout = product.weights.layout;
    if (!product.present()) refuse(name + " is missing");
    if (layout.outputs != outputs || layout.inputs != inputs) {
      refuse(name + " is " + std::to_string(layout.outputs) + " x " + std::to_string(layout.inputs) + ", expected " +
             std::to_string(outputs) + " x " + std::to_string(inputs));
    }
  };
  auto mlp_shaped = [&](const Mlp& mlp, int64_t inner, const std::string& name) {
    if (inner < 1 || inner > kMaxInputs) refuse(name + " has no inner size");
    shaped(mlp.up, w_.gated ? 2 * round_up(inner, kPanel) : inner, w_.hidden, name + ".up");
    shaped(mlp.down, w_.hidden, inner, name + ".down");
  };
  if (w_.embed.layout.outputs != w_.vocab || w_.embed.layout.inputs != w_.hidden) refuse("embed has the wrong shape");
  if (w_.head.present()) shaped(w_.head, w_.vocab, w_.hidden, "head");
  const size_t types = w_.token_types.size();
  if (types % static_cast<size_t>(w_.hidden) != 0) refuse("token_types has the wrong size");
  if (w_.reach < 0 || w_.reach > (int64_t{1} << 20)) refuse("reach out of range: " + std::to_string(w_.reach));
  if (!w_.alibi.empty() && (static_cast<int64_t>(w_.alibi.size()) != w_.heads || !w_.distances.empty())) {
    refuse("alibi has the wrong size, or distances are there too");
  }
  if (!w_.distances.empty() && static_cast<int64_t>(w_.distances.size()) != w_.heads * (2 * w_.reach + 1)) {
    refuse("distances has the wrong size");
  }
  const int64_t largest = widest([](const ModelWeights&, const Layer& layer) { return layer.head_size; });
  for (const Rope& rope : w_.ropes) {
    for (int axis : rope.axes) {
      if (axis < 0 || axis > 2) refuse("an axis of a rope must be 0, 1 or 2");
    }
    for (const std::vector<float>& table : rope.inv_freq) {
      if (!rope.axes.empty() && rope.axes.size() != table.size()) refuse("a rope has too few or too many axes");
      if (2 * static_cast<int64_t>(table.size()) > largest) refuse("a rope table is longer than half a head");
    }
  }
  check_recurrent();
  check_streams();
  for (size_t i = 0; i < w_.layers.size(); ++i) {
    const Layer& layer = w_.layers[i];
    const std::string name = "layers." + std::to_string(i);
    if (layer.rope < -1 || layer.rope >= static_cast<int>(w_.ropes.size()))
      refuse(name + " names a rope that is not there");
    if (layer.window < 0 || layer.chunk < 0) refuse(name + " has a negative window");
    check_heads(layer, name);
    if (layer.attends) {
      const int64_t read = w_.paired && i == 0 ? 2 * w_.hidden : w_.hidden;
      shaped(layer.qkv, qkv_outputs(layer), read, name + ".attn.qkv");
      shaped(layer.o, w_.hidden, w_.heads * (w_.keeps_latent ? w_.value_size : layer.value_size), name + ".attn.o");
    }
    if (w_.latent > 0) {
      const int64_t plain = w_.head_size - w_.turning;
      for (const Product& head : layer.q_to_latent) shaped(head, w_.latent, plain, name + ".attn.q_to_latent");
      for (const Product& head : layer.v_from_latent) {
        shaped(head, w_.value_size, w_.latent, name + ".attn.v_from_latent");
      }
      if (!w_.keeps_latent) {
        shaped(layer.kv_up, w_.heads * (plain + w_.value_size), w_.latent, name + ".attn.kv_up");
      }
      if (!layer.kv_latent_norm.present()) refuse(name + " lacks the norm of its latent");
    }
    if (w_.query_latent > 0) {
      shaped(layer.q_up, w_.heads * w_.head_size, w_.query_latent, name + ".attn.q_up");
      if (!layer.q_latent_norm.present()) refuse(name + " lacks the norm of its queries' latent");
    }
    if (layer.shares && (!w_.causal || w_.latent > 0 || w_.attention_gate || layer.recurs || !layer.attends)) {
      refuse(name + " cannot share keys and values");
    }
    if (layer.q_norm.present() != (layer.k_norm.present() || (layer.shares && layer.q_norm.present()))) {
      refuse(name + " lacks a norm of q or k");
    }
    if (w_.qk_norm != QkNorm::kNone && layer.attends && layer.normed && !layer.q_norm.present()) {
      refuse(name + " lacks its q and k norms");
    }
    if (!layer.sinks.empty() && static_cast<int64_t>(layer.sinks.size()) != w_.heads) {
      refuse(name + ".attn.sinks has the wrong size");
    }
    if (!layer.key_offsets.empty()) {
      if (static_cast<int64_t>(layer.key_offsets.size()) != layer.kv_heads * layer.head_size) {
        refuse(name + ".attn.key_offsets has the wrong size");
      }
      if (!layer.attends || layer.shares || !w_.causal || w_.keeps_latent) refuse(name + " has no keys to offset");
      if (!layer.sinks.empty() || w_.attention_softcap > 0.0f) {
        refuse(name + " compares scores with what key offsets do not move: a sink or a soft cap");
      }
    }
    const bool adds = static_cast<int64_t>(i) < w_.feature_layers;
    if (adds && (!layer.feeds || w_.streams.count > 0)) refuse(name + " cannot add features");
    if (w_.paired && i == 0 && (!layer.attends || w_.latent > 0 || w_.streams.count > 0 || w_.feature_layers > 0)) {
      refuse(name + " cannot read pairs");
    }
    if (!layer.feeds) continue;
    if (layer.experts.empty() || layer.beside) mlp_shaped(layer.mlp, layer.inner, name + ".mlp");
    if (layer.experts.empty()) continue;
    if (layer.beside && (w_.parallel || !layer.router_norm.present() || !layer.experts_norm.present() ||
                         !layer.experts_out_norm.present() || !layer.dense_out_norm.present())) {
      refuse(name + " lacks a norm of its experts or of the MLP beside them");
    }
    const int64_t count = static_cast<int64_t>(layer.experts.size());
    if (w_.top_k < 1 || w_.top_k > count) refuse(name + " chooses more experts than it has");
    shaped(layer.router, count, w_.hidden, name + ".mlp.router");
    if (count % w_.expert_groups != 0 || w_.top_groups * (count / w_.expert_groups) < w_.top_k) {
      refuse(name + " has too few experts in its groups");
    }
    for (const Mlp& expert : layer.experts) mlp_shaped(expert, w_.expert_inner, name + ".mlp.experts");
    if (!layer.router_bias.empty() && static_cast<int64_t>(layer.router_bias.size()) != count) {
      refuse(name + ".mlp.router_bias has the wrong size");
    }
    if (!layer.expert_scales.empty() && static_cast<int64_t>(layer.expert_scales.size()) != count) {
      refuse(name + ".mlp.expert_scales has the wrong size");
    }
    if (layer.shared.up.present()) mlp_shaped(layer.shared, w_.shared_inner, name + ".mlp.shared");
    if (layer.shared_gate.present()) shaped(layer.shared_gate, 1, w_.hidden, name + ".mlp.shared_gate");
  }
}

void Model::check_heads(const Layer& layer, const std::string& name) const {
  auto within = [&](const char* what, int64_t value, int64_t most) {
    if (value < 1 || value > most)
      refuse(std::string(what) + " of " + name + " out of range: " + std::to_string(value));
  };
  within("kv_heads", layer.kv_heads, 4096);
  within("head_size", layer.head_size, 1024);
  within("value_size", layer.value_size, 1024);
  if (layer.inner < 0 || layer.inner > kMaxInputs) refuse("inner of " + name + " out of range");
  if (w_.heads % layer.kv_heads != 0) refuse("heads must be a multiple of the kv_heads of " + name);
  // What `o` reads; queries that meet a latent are wider.
  const int64_t widest = w_.keeps_latent ? w_.head_size : std::max(layer.head_size, layer.value_size);
  if (w_.heads * widest > kMaxInputs) refuse("the heads of " + name + " are too large");
  const Layer& first = w_.layers.front();
  const bool alike = layer.kv_heads == first.kv_heads && layer.head_size == first.head_size;
  // An encoder's layers take turns with the memory of one, and latents have one size.
  if (!alike && (!w_.causal || w_.latent > 0)) refuse(name + " has other heads than the first layer");
  if (w_.latent == 0 && layer.value_size != layer.head_size) refuse(name + " has values of another size than keys");
  if (layer.rope < 0) return;
  for (const std::vector<float>& table : w_.ropes[static_cast<size_t>(layer.rope)].inv_freq) {
    if (2 * static_cast<int64_t>(table.size()) > layer.head_size) refuse("a rope table is longer than half a head");
  }
}

void Model::check_step(const StepArgs& args) const {
  auto misfits = [&](const Layer& layer) {
    if (!layer.attends) return false;
    const KvLayout& kv = args.kv->layout(layer.kv);
    return kv.heads != layer.kv_heads || kv.head_size != layer.head_size || kv.value_size != layer.value_size ||
           kv.values_in_keys != w_.keeps_latent;
  };
  if (args.kv->layers() != kv_layers() || std::any_of(w_.layers.begin(), w_.layers.end(), misfits)) {
    refuse("the KV memory belongs to a model of another shape");
  }
  if (args.rows < 1 || args.rows > max_rows_) {
    refuse("a step takes 1 to " + std::to_string(max_rows_) + " rows, not " + std::to_string(args.rows));
  }
  if (args.sequences < 1 || args.offsets[0] != 0 || args.offsets[args.sequences] != args.rows) {
    refuse("offsets do not cover the rows");
  }
  for (int64_t r = 0; r < args.rows; ++r) {
    if (args.tokens[r] < 0 || args.tokens[r] >= w_.vocab) {
      refuse("token " + std::to_string(args.tokens[r]) + " is not in the vocabulary");
    }
    if (args.feature_rows != nullptr && (args.feature_rows[r] < -1 || args.feature_rows[r] >= args.feature_count)) {
      refuse("feature " + std::to_string(args.feature_rows[r]) + " does not exist");
    }
    if (w_.paired && (args.feature_rows == nullptr || args.feature_rows[r] < 0)) refuse("every row needs a feature");
  }
  for (int64_t i = 0; i < args.kept_count; ++i) {
    const int64_t before = i == 0 ? -1 : args.kept_layers[i - 1];
    if (args.kept_layers[i] <= before || args.kept_layers[i] >= static_cast<int64_t>(w_.layers.size())) {
      refuse("kept_layers must be ascending layers");
    }
  }
  if (w_.paired && args.adapter_count > 0) refuse("a model that reads pairs takes no adapters");
  if (args.kept_count > 0 && w_.streams.count > 0) refuse("layers with several streams are not kept");
  check_states(args);
  const int64_t learned = static_cast<int64_t>(w_.positions.size()) / w_.hidden;
  const int64_t types = static_cast<int64_t>(w_.token_types.size()) / w_.hidden;
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int64_t fresh = int64_t{args.offsets[s + 1]} - args.offsets[s];
    const int64_t computed = args.computed[s];
    if (fresh < 1) refuse("sequence " + std::to_string(s) + " has no rows");
    if (computed < 0 || computed + fresh > (int64_t{1} << 30)) refuse("computed tokens out of range");
    if (!w_.causal && computed != 0) refuse("an encoder computes a sequence in one piece");
    if (learned > 0 && computed + fresh > learned) refuse("the sequence is longer than the learned positions");
    if (args.rope_variants[s] < 0 || args.rope_variants[s] > 1) refuse("rope variant must be 0 or 1");
    if (args.second_texts != nullptr && args.second_texts[s] >= 0 && types < 2) {
      refuse("the model has no token type for a second text");
    }
    const int64_t blocks = (computed + fresh + kBlock - 1) / kBlock;
    if (blocks > args.table_stride) refuse("the block table of sequence " + std::to_string(s) + " is too short");
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t block = args.block_tables[s * args.table_stride + b];
      if (block < 0 || block >= args.kv->blocks()) refuse("block " + std::to_string(block) + " does not exist");
    }
  }
  for (int64_t s = 0; args.spans != nullptr && s < args.sequences; ++s) {
    const int64_t end = args.computed[s] + args.offsets[s + 1] - args.offsets[s];
    for (int64_t r = args.offsets[s]; r < args.offsets[s + 1]; ++r) {
      const int64_t position = args.computed[s] + r - args.offsets[s];
      const int32_t* span = args.spans + r * 2;
      if (span[0] < 0 || span[0] > position || span[1] <= position || span[1] > end) {
        refuse("row " + std::to_string(r) + " is not in its span, or the span is not computed in one piece");
      }
    }
  }
  for (int64_t i = 0; i < args.wanted_count; ++i) {
    if (args.wanted[i] < (i == 0 ? 0 : args.wanted[i - 1] + 1) || args.wanted[i] >= args.rows) {
      refuse("wanted rows must ascend and exist");
    }
  }
  if (!args.hidden && !w_.head.present() && args.wanted_count > 0) refuse("the model has no output head");
}

}  // namespace headrace
