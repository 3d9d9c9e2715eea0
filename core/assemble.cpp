// From a description and named tensors to ModelWeights. Owns the names of the description's facts and of the tensors.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "bindings.h"

namespace headrace {
namespace {

template <typename T>
T fact(const nb::dict& facts, const char* key) {
  if (!facts.contains(key)) refuse(std::string("the description lacks '") + key + "'");
  try {
    return nb::cast<T>(facts[key]);
  } catch (const nb::cast_error&) {
    refuse(std::string("'") + key + "' in the description has the wrong type");
  }
}

nb::dict facts_of(nb::handle entry, const char* what) {
  if (!nb::isinstance<nb::dict>(entry)) refuse(std::string("each of '") + what + "' in the description must be a dict");
  return nb::borrow<nb::dict>(entry);
}

// Reads the description and takes each tensor by its canonical name.
class Assembly {
 public:
  Assembly(nb::dict description, nb::dict tensors)
      : description_(std::move(description)), tensors_(std::move(tensors)) {}

  template <typename T>
  T value(const char* key) const {
    return fact<T>(description_, key);
  }

  PackedView packed(const std::string& name) const {
    nb::object tensor = tensor_of(name);
    if (!nb::isinstance<Packed>(tensor)) refuse("tensor '" + name + "' must be packed");
    return nb::cast<Packed&>(tensor).view;
  }

  Array<float, 1> vector(const std::string& name, int64_t size) const {
    try {
      Array<float, 1> values = nb::cast<Array<float, 1>>(tensor_of(name), false);
      check_natural(values, name.c_str());
      if (size >= 0 && static_cast<int64_t>(values.size()) != size) {
        refuse("tensor '" + name + "' has " + std::to_string(values.size()) + " values, expected " +
               std::to_string(size));
      }
      return values;
    } catch (const nb::cast_error&) {
      refuse("tensor '" + name + "' must be a vector of f32");
    }
  }

  bool has(const std::string& name) const { return tensors_.contains(name.c_str()); }

  Buffer<float> padded(const std::string& name, int64_t size, int64_t multiple) const {
    Array<float, 1> values = vector(name, size);
    Buffer<float> buffer(round_up(size, multiple));
    std::memcpy(buffer.data(), values.data(), static_cast<size_t>(size) * sizeof(float));
    return buffer;
  }

  std::vector<float> list(const std::string& name) const {
    if (!has(name)) return {};
    Array<float, 1> values = vector(name, -1);
    return {values.data(), values.data() + values.size()};
  }

  // Zeros follow the values, up to `size`.
  std::vector<float> list_of(const std::string& name, int64_t count, int64_t size) const {
    Array<float, 1> values = vector(name, count);
    std::vector<float> list(static_cast<size_t>(size));
    std::copy(values.data(), values.data() + count, list.begin());
    return list;
  }

  NormWeights norm(const std::string& name, int64_t size) const {
    NormWeights norm;
    if (!has(name)) return norm;
    norm.weight = padded(name, size, kRowPad);
    if (has(name + ".bias")) norm.bias = padded(name + ".bias", size, kRowPad);
    return norm;
  }

  Product product(const std::string& name) const {
    Product product;
    product.weights = packed(name);
    if (has(name + ".bias")) product.bias = padded(name + ".bias", product.weights.layout.outputs, kPanel);
    return product;
  }

  // A product of each head, which has so many outputs: whole panels of one tensor.
  std::vector<Product> products_by_head(const std::string& name, int64_t heads, int64_t outputs) const {
    const PackedView all = packed(name);
    const int64_t panels = round_up(outputs, kPanel) / kPanel;
    if (all.layout.outputs != heads * panels * kPanel) refuse("tensor '" + name + "' has the wrong shape");
    std::vector<Product> products(static_cast<size_t>(heads));
    for (int64_t h = 0; h < heads; ++h) {
      PackedView& view = products[static_cast<size_t>(h)].weights;
      view = all;
      view.data = all.data + h * panels * all.layout.panel_bytes;
      view.layout.outputs = outputs;
      view.layout.panels = panels;
      view.layout.bytes = panels * all.layout.panel_bytes;
    }
    return products;
  }

  Mlp mlp(const std::string& name, bool gated) const {
    return {product(name + (gated ? ".gate_up" : ".up")), product(name + ".down")};
  }

 private:
  nb::object tensor_of(const std::string& name) const {
    if (!has(name)) refuse("tensor '" + name + "' is missing");
    return nb::object(tensors_[name.c_str()]);
  }

  nb::dict description_;
  nb::dict tensors_;
};

RecurrentShape recurrent_shape(const nb::dict& facts) {
  RecurrentShape shape;
  const std::string kind = fact<std::string>(facts, "kind");
  if (kind == "short_conv") shape.kind = RecurrentKind::kShortConv;
  if (kind == "scan") shape.kind = RecurrentKind::kScan;
  if (kind == "delta") shape.kind = RecurrentKind::kDelta;
  if (shape.kind == RecurrentKind::kNone) refuse("unknown kind of recurrent layer '" + kind + "'");
  shape.taps = fact<int64_t>(facts, "taps");
  shape.heads = fact<int64_t>(facts, "heads");
  shape.groups = fact<int64_t>(facts, "groups");
  shape.head_size = fact<int64_t>(facts, "head_size");
  shape.state_size = fact<int64_t>(facts, "state_size");
  shape.norm_size = fact<int64_t>(facts, "norm_size");
  shape.norm_first = fact<bool>(facts, "norm_first");
  shape.eps = fact<float>(facts, "eps");
  shape.step_least = fact<float>(facts, "step_least");
  shape.step_most = fact<float>(facts, "step_most");
  shape.in_factors = fact<std::vector<float>>(facts, "in_factors");
  for (int64_t size : {shape.taps, shape.heads, shape.groups + 1, shape.head_size, shape.state_size + 1}) {
    if (size < 1 || size > (int64_t{1} << 20)) refuse("a recurrent size is out of range: " + std::to_string(size));
  }
  return shape;
}

RecurrentWeights recurrent_weights(const Assembly& parts, const RecurrentShape& shape, const std::string& name) {
  RecurrentWeights weights;
  const int64_t channels = shape.channels();
  const int64_t stride = round_up(channels, kStateLanes);
  const std::vector<float> taps = parts.list_of(name + ".conv", channels * shape.taps, channels * shape.taps);
  weights.taps.resize(static_cast<size_t>(shape.taps * stride));
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t k = 0; k < shape.taps; ++k) {
      weights.taps[static_cast<size_t>(k * stride + c)] = taps[static_cast<size_t>(c * shape.taps + k)];
    }
  }
  weights.conv_bias.resize(static_cast<size_t>(stride));
  if (parts.has(name + ".conv.bias")) weights.conv_bias = parts.list_of(name + ".conv.bias", channels, stride);
  if (shape.kind == RecurrentKind::kShortConv) return weights;
  weights.step_bias = parts.list_of(name + ".step_bias", shape.heads, shape.heads);
  weights.decay = parts.list_of(name + ".decay", shape.heads, shape.heads);
  for (float& decay : weights.decay) decay = -static_cast<float>(std::exp(double{decay}));  // stored as a logarithm
  weights.skip.resize(static_cast<size_t>(shape.heads));
  if (parts.has(name + ".skip")) weights.skip = parts.list_of(name + ".skip", shape.heads, shape.heads);
  if (parts.has(name + ".norm")) {
    const int64_t size = static_cast<int64_t>(parts.vector(name + ".norm", -1).size());
    weights.norm = parts.list_of(name + ".norm", size, size + kStateLanes);
  }
  return weights;
}

StreamWeights stream_weights(const Assembly& parts, const ModelWeights& w, const std::string& name) {
  StreamWeights weights;
  weights.input_gate = parts.product(name + ".inputs.in");
  weights.input_out = parts.product(name + ".inputs.out");
  weights.input_norm = parts.norm(name + ".inputs.norm", w.hidden);
  if (w.streams.count == 0) return weights;
  weights.router_norm = parts.norm(name + ".streams.router_norm", w.hidden);
  weights.router = parts.product(name + ".streams.router");
  weights.predict = parts.list(name + ".streams.predict");
  weights.correct = parts.list(name + ".streams.correct");
  weights.out_scale = parts.list(name + ".streams.out_scale");
  weights.past_in = parts.product(name + ".past.in");
  weights.past_out = parts.product(name + ".past.out");
  weights.past_norm = parts.norm(name + ".past.norm", w.hidden);
  return weights;
}

Buffer<float> ones(int64_t size) {
  Buffer<float> values(round_up(size, kRowPad));
  std::fill(values.data(), values.data() + size, 1.0f);
  return values;
}

int chosen(const std::string& name, const std::vector<std::string>& choices, const char* what) {
  for (size_t i = 0; i < choices.size(); ++i) {
    if (choices[i] == name) return static_cast<int>(i);
  }
  refuse(std::string("unknown ") + what + " '" + name + "'");
}

Layer assemble_layer(const Assembly& parts, const ModelWeights& w, size_t index, nb::handle entry) {
  const std::string name = "layers." + std::to_string(index);
  const std::string attn = name + ".attn";
  const std::string feed = name + ".mlp";
  Layer layer;
  nb::dict facts = facts_of(entry, "layers");
  layer.window = fact<int64_t>(facts, "window");
  layer.chunk = fact<int64_t>(facts, "chunk");
  layer.rope = fact<int>(facts, "rope");
  layer.normed = fact<bool>(facts, "normed");
  layer.grows = fact<bool>(facts, "grows");
  layer.spans = static_cast<Spans>(chosen(fact<std::string>(facts, "spans"), {"ignore", "reach", "only"}, "spans"));
  const int64_t experts = fact<int64_t>(facts, "experts");
  auto size_or = [&](const char* key, int64_t usual) {
    const int64_t size = fact<int64_t>(facts, key);
    return size == 0 ? usual : size;
  };
  layer.kv_heads = size_or("kv_heads", w.kv_heads);
  layer.head_size = size_or("head_size", w.head_size);
  layer.value_size = w.value_size == w.head_size ? layer.head_size : w.value_size;
  if (w.keeps_latent) {
    layer.kv_heads = 1;
    layer.head_size = w.turning + w.latent;
    layer.value_size = w.latent;
  }
  layer.inner = size_or("inner", w.inner);
  layer.beside = fact<bool>(facts, "beside");
  for (int64_t size : {layer.kv_heads, layer.head_size}) {
    if (size < 1 || size > (int64_t{1} << 24))
      refuse("a size of " + name + " is out of range: " + std::to_string(size));
  }
  if (parts.has(name + ".scale")) layer.scale = parts.list_of(name + ".scale", 1, 1).front();
  layer.attn_norm = parts.norm(attn + ".norm", w.hidden);
  layer.attn_out_norm = parts.norm(attn + ".out_norm", w.hidden);
  layer.attn_residual_norm = parts.norm(attn + ".residual_norm", w.hidden);
  layer.mlp_norm = parts.norm(feed + ".norm", w.hidden);
  layer.mlp_out_norm = parts.norm(feed + ".out_norm", w.hidden);
  layer.mlp_residual_norm = parts.norm(feed + ".residual_norm", w.hidden);
  const bool full = w.qk_norm == QkNorm::kFull || w.qk_norm == QkNorm::kEachHead;
  layer.q_norm = parts.norm(attn + ".q_norm", full ? w.heads * layer.head_size : layer.head_size);
  layer.k_norm = parts.norm(attn + ".k_norm", full ? layer.kv_heads * layer.head_size : layer.head_size);
  if (w.unit_norms && layer.normed) {
    for (NormWeights* norm : {&layer.q_norm, &layer.k_norm}) norm->weight = ones(layer.head_size);
  }
  layer.sinks = parts.list(attn + ".sinks");
  layer.attends = fact<bool>(facts, "attends");
  layer.recurs = fact<bool>(facts, "recurs");
  layer.feeds = fact<bool>(facts, "mlp");
  layer.shares = fact<int64_t>(facts, "shares") >= 0;
  layer.key_offsets = parts.list(attn + ".key_offsets");
  if (!fact<nb::object>(facts, "gate_cutoff").is_none()) layer.gate_cutoff = fact<float>(facts, "gate_cutoff");
  if (w.streams.input_size > 0) layer.streams = stream_weights(parts, w, name);
  if (fact<bool>(facts, "value_norm")) layer.v_norm.weight = ones(layer.value_size);
  if (layer.attends) {
    layer.qkv = parts.product(attn + ".qkv");
    layer.o = parts.product(attn + ".o");
  }
  if (layer.recurs) {
    if (w.recurrent.kind == RecurrentKind::kNone) refuse("the description lacks the shape of recurrent layers");
    layer.recurrent_in = parts.product(name + ".recurrent.in");
    layer.recurrent_out = parts.product(name + ".recurrent.out");
    layer.recurrent = recurrent_weights(parts, w.recurrent, name + ".recurrent");
  }
  if (w.latent > 0) {
    layer.kv_latent_norm = parts.norm(attn + ".kv_latent_norm", w.latent);
    if (w.keeps_latent) {
      layer.q_to_latent = parts.products_by_head(attn + ".q_to_latent", w.heads, w.latent);
      layer.v_from_latent = parts.products_by_head(attn + ".v_from_latent", w.heads, w.value_size);
    } else {
      layer.kv_up = parts.product(attn + ".kv_up");
    }
  }
  if (w.query_latent > 0) {
    layer.q_latent_norm = parts.norm(attn + ".q_latent_norm", w.query_latent);
    layer.q_up = parts.product(attn + ".q_up");
  }
  if (!layer.feeds) return layer;
  if (experts == 0 || layer.beside) layer.mlp = parts.mlp(feed, w.gated);
  if (experts == 0) return layer;
  if (layer.beside) {
    // The router reads rows of length one, times its weights.
    layer.router_norm = parts.norm(feed + ".router_norm", w.hidden);
    const float length = 1.0f / std::sqrt(static_cast<float>(w.hidden));
    for (int64_t i = 0; layer.router_norm.present() && i < w.hidden; ++i) layer.router_norm.weight.data()[i] *= length;
    layer.experts_norm = parts.norm(feed + ".experts_norm", w.hidden);
    layer.experts_out_norm = parts.norm(feed + ".experts_out_norm", w.hidden);
    layer.dense_out_norm = parts.norm(feed + ".dense_out_norm", w.hidden);
    layer.expert_scales = parts.list(feed + ".expert_scales");
  }
  layer.router = parts.product(feed + ".router");
  layer.router_bias = parts.list(feed + ".router_bias");
  if (parts.has(feed + ".shared.down")) layer.shared = parts.mlp(feed + ".shared", w.gated);
  if (parts.has(feed + ".shared_gate")) layer.shared_gate = parts.product(feed + ".shared_gate");
  for (int64_t e = 0; e < experts; ++e)
    layer.experts.push_back(parts.mlp(feed + ".experts." + std::to_string(e), w.gated));
  return layer;
}

}  // namespace

ModelWeights assemble(nb::dict description, nb::dict tensors) {
  const Assembly parts(std::move(description), std::move(tensors));
  ModelWeights w;
  w.vocab = parts.value<int64_t>("vocab");
  w.hidden = parts.value<int64_t>("hidden");
  w.inner = parts.value<int64_t>("inner");
  w.expert_inner = parts.value<int64_t>("expert_inner");
  w.shared_inner = parts.value<int64_t>("shared_inner");
  w.heads = parts.value<int64_t>("heads");
  w.kv_heads = parts.value<int64_t>("kv_heads");
  w.head_size = parts.value<int64_t>("head_size");
  w.latent = parts.value<int64_t>("latent");
  w.query_latent = parts.value<int64_t>("query_latent");
  w.keeps_latent = parts.value<bool>("keeps_latent");
  w.turning = parts.value<int64_t>("turning");
  w.value_size = parts.value<int64_t>("value_size");
  w.causal = parts.value<bool>("causal");
  w.gated = parts.value<bool>("gated");
  w.layer_norm = chosen(parts.value<std::string>("norm"), {"rms", "layer"}, "norm") == 1;
  w.eps = parts.value<float>("eps");
  w.unit_norms = parts.value<bool>("unit_norms");
  w.qk_norm = static_cast<QkNorm>(
      chosen(parts.value<std::string>("qk_norm"), {"none", "head", "full", "each_head"}, "qk norm"));
  w.activation = static_cast<Activation>(
      chosen(parts.value<std::string>("activation"),
             {"silu", "gelu", "gelu_tanh", "relu", "clamped_silu", "squared_relu", "quick_gelu"}, "activation"));
  w.gate_slope = parts.value<float>("gate_slope");
  w.gate_limit = parts.value<float>("gate_limit");
  w.attention_scale = parts.value<float>("attention_scale");
  w.attention_softcap = parts.value<float>("attention_softcap");
  w.growth = parts.value<float>("growth");
  w.growth_tokens = parts.value<int64_t>("growth_tokens");
  w.growth_first = parts.value<int64_t>("growth_first");
  w.logit_softcap = parts.value<float>("logit_softcap");
  w.embedding_scale = parts.value<float>("embedding_scale");
  w.attention_factor = parts.value<float>("attention_factor");
  w.recurrent_factor = parts.value<float>("recurrent_factor");
  w.mlp_factor = parts.value<float>("mlp_factor");
  w.top_k = parts.value<int64_t>("top_k");
  w.normalise_experts = parts.value<bool>("normalise_experts");
  w.sigmoid_experts = parts.value<bool>("sigmoid_experts");
  w.expert_scale = parts.value<float>("expert_scale");
  w.expert_margin = parts.value<float>("expert_margin");
  w.scales_inputs = parts.value<bool>("scales_inputs");
  w.expert_groups = parts.value<int64_t>("expert_groups");
  w.top_groups = parts.value<int64_t>("top_groups");
  w.group_best = parts.value<int64_t>("group_best");
  w.parallel = parts.value<bool>("parallel");
  w.feature_layers = parts.value<int64_t>("feature_layers");
  w.paired = parts.value<bool>("paired");
  w.attention_gate = parts.value<bool>("attention_gate");
  nb::object recurrent = parts.value<nb::object>("recurrent");
  if (!recurrent.is_none()) w.recurrent = recurrent_shape(facts_of(recurrent, "recurrent"));
  for (int64_t size : {w.vocab, w.hidden, w.heads, w.kv_heads, w.head_size, w.latent + 1, w.query_latent + 1}) {
    if (size < 1 || size > (int64_t{1} << 24)) refuse("a size is out of range: " + std::to_string(size));
  }

  w.streams.count = parts.value<int64_t>("streams");
  w.streams.rank = parts.value<int64_t>("past_rank");
  w.streams.input_size = parts.value<int64_t>("layer_input");
  for (int64_t size : {w.streams.count, w.streams.rank, w.streams.input_size}) {
    if (size < 0 || size > kMaxInputs) refuse("a size of streams is out of range: " + std::to_string(size));
  }
  for (int64_t i = 1; i < w.streams.count; ++i) {
    w.stream_in.push_back(parts.product("streams." + std::to_string(i - 1) + ".in"));
    w.stream_out.push_back(parts.product("streams." + std::to_string(i - 1) + ".out"));
  }
  if (w.streams.input_size > 0) {
    w.inputs_embed = parts.packed("inputs.embed");
    w.inputs_in = parts.product("inputs.in");
    w.inputs_norm = parts.norm("inputs.norm", w.streams.input_size);
  }
  w.embed = parts.packed("embed");
  w.positions = parts.list("positions");
  if (w.positions.size() % static_cast<size_t>(w.hidden) != 0) refuse("positions has the wrong size");
  w.token_types = parts.list("token_types");
  w.distances = parts.list("distances");
  w.reach = parts.value<int64_t>("reach");
  w.alibi = parts.value<std::vector<float>>("alibi");
  w.embed_norm = parts.norm("embed_norm", w.hidden);
  for (nb::handle entry : parts.value<nb::list>("ropes")) {
    nb::dict facts = facts_of(entry, "ropes");
    Rope rope;
    rope.inv_freq[0] = fact<std::vector<float>>(facts, "inv_freq");
    rope.inv_freq[1] = fact<std::vector<float>>(facts, "long_inv_freq");
    rope.axes = fact<std::vector<int>>(facts, "axes");
    rope.scale[0] = fact<float>(facts, "scale");
    rope.scale[1] = fact<float>(facts, "long_scale");
    w.ropes.push_back(std::move(rope));
  }
  size_t index = 0;
  int64_t kv = 0, state = 0;
  for (nb::handle entry : parts.value<nb::list>("layers")) {
    w.layers.push_back(assemble_layer(parts, w, index++, entry));
    Layer& layer = w.layers.back();
    const int64_t shared = fact<int64_t>(facts_of(entry, "layers"), "shares");
    if (shared >= 0) {
      if (shared + 1 >= static_cast<int64_t>(w.layers.size())) refuse("a layer shares what no earlier layer has");
      const Layer& owner = w.layers[static_cast<size_t>(shared)];
      if (!owner.attends || owner.shares) refuse("a layer shares what another layer does not compute");
      if (owner.kv_heads != layer.kv_heads || owner.head_size != layer.head_size) {
        refuse("a layer shares keys of another shape than its own");
      }
      layer.kv = owner.kv;
    } else {
      layer.kv = layer.attends && w.causal ? kv++ : 0;
    }
    layer.state = layer.recurs ? state++ : 0;
  }
  w.final_norm = parts.norm("norm", w.hidden);
  if (parts.value<bool>("tied")) {
    w.head.weights = w.embed;
  } else if (parts.has("head")) {
    w.head = parts.product("head");
  }
  if (parts.has("head.bias")) w.head.bias = parts.padded("head.bias", w.vocab, kPanel);
  return w;
}

}  // namespace headrace
