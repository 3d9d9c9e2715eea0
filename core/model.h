// A model bound to its weights, and the step that computes it.
//
// Owns the order of operations of a layer and the scratch memory of a step; nothing is allocated in a step. Knows
// nothing of requests: a step is a ragged batch of token rows, the KV blocks of each sequence, and the rows whose
// results are wanted.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "kv.h"
#include "pool.h"
#include "recurrent.h"
#include "rotation.h"
#include "streams.h"

namespace headrace {

// What a layer does with the spans of rows, see StepArgs: nothing, sees to the end of them too, or sees them alone.
enum class Spans : int { kIgnore, kReach, kOnly };
enum class QkNorm : int { kNone, kHead, kFull, kEachHead };  // kEachHead: layer norms, each head with its own weights

// Zeroed memory aligned to 64 bytes.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : count_(count) {
    if (count > 0) data_.reset(static_cast<T*>(allocate(static_cast<size_t>(count) * sizeof(T))));
  }
  T* data() const { return data_.get(); }
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(T)); }
  bool empty() const { return count_ == 0; }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  static void* allocate(size_t bytes);
  std::unique_ptr<T, Free> data_;
  int64_t count_ = 0;
};

struct NormWeights {
  Buffer<float> weight;  // padded with zeros to a multiple of kRowPad
  Buffer<float> bias;
  bool present() const { return !weight.empty(); }
};

struct Product {
  PackedView weights;
  Buffer<float> bias;                  // padded with zeros to whole panels
  const Rotation* rotation = nullptr;  // of the rows that it multiplies, where its weights are rotated
  bool present() const { return weights.data != nullptr; }
};

struct Mlp {
  Product up;  // gated: gates and values in panels by turns, see kernels.h
  Product down;
};

constexpr int64_t kMostHeads = 32;  // of queries in one call of the attention's kernel

inline int64_t pad_row(int64_t width) { return round_up(width, kRowPad); }

// A layer's, in a model with streams or with inputs of each layer's own.
struct StreamWeights {
  NormWeights router_norm;
  Product router;
  std::vector<float> predict;  // [streams][streams][streams]: what a number of the router adds to a stream, of another
  std::vector<float> correct;  // [streams][streams]
  std::vector<float> out_scale;  // [hidden], of what the layer's input meets; or empty
  Product past_in, past_out;     // the narrow path past the attention
  NormWeights past_norm;
  Product input_gate, input_out;  // of the layer's own input of a token
  NormWeights input_norm;
};

struct Layer {
  bool attends = true;  // its first sublayer is attention ...
  bool recurs = false;  // ... or recurrent, or both are added together, or there is none
  bool feeds = true;    // its second sublayer is an MLP or a mixture of experts, or there is none
  int64_t kv = 0;       // which of the layers with keys and values it is, or reads
  bool shares = false;  // it has queries alone, and reads keys and values that an earlier layer computes
  int64_t state = 0;    // which of the layers with a state it is
  int64_t window = 0;   // tokens seen up to the query, and where not causal as many from it on; 0: sees all
  int64_t chunk = 0;    // tokens are seen from the last multiple of this on; 0: sees all
  int rope = -1;        // -1: no positions
  bool normed = true;   // with a qk norm
  Spans spans = Spans::kIgnore;
  bool grows = false;  // queries grow with their position, see ModelWeights::growth
  int64_t kv_heads = 0;
  int64_t head_size = 0;   // dims of a query and a key
  int64_t value_size = 0;  // dims of a value
  int64_t inner = 0;       // of its dense MLP
  float scale = 1.0f;      // multiplies the residual after it
  NormWeights attn_norm, attn_out_norm, attn_residual_norm;
  NormWeights mlp_norm, mlp_out_norm, mlp_residual_norm;
  NormWeights q_norm, k_norm;
  std::vector<float> sinks;  // [heads], see AttentionArgs, or empty
  // [kv_heads][head_size], or empty: KV memory holds keys less these. A query meets all keys of its head, so its scores
  // all move by the same number, which softmax takes out again.
  std::vector<float> key_offsets;
  // Of its heads' keys and values, where KV memory keeps them rotated.
  const Rotation* key_rotation = nullptr;
  const Rotation* value_rotation = nullptr;
  Product qkv, o;
  NormWeights q_latent_norm, kv_latent_norm;
  Product q_up, kv_up;                              // from latents to heads, see ModelWeights::latent
  std::vector<Product> q_to_latent, v_from_latent;  // by head, see ModelWeights::keeps_latent
  Product recurrent_in, recurrent_out;
  RecurrentWeights recurrent;
  NormWeights v_norm;             // of each value head, or none
  float gate_cutoff = kNoCutoff;  // gates count above the row's mean by so many deviations
  StreamWeights streams;
  Mlp mlp;
  Product router;
  std::vector<float> router_bias;  // added to the experts' weights when they are chosen, or empty
  // Experts beside the dense MLP read the residual themselves. Their outputs and the MLP's are normalised, then added.
  bool beside = false;
  NormWeights router_norm, experts_norm, experts_out_norm, dense_out_norm;
  std::vector<float> expert_scales;  // [experts] multiply the weights of those chosen, or empty
  std::vector<Mlp> experts;
  Mlp shared;           // an expert that every row goes to, or none
  Product shared_gate;  // its weight is the sigmoid of this product's one output; none: 1
};

struct Rope {
  std::vector<float> inv_freq[2];  // short and long
  std::vector<int> axes;           // [pairs] which number of a row's place each turns by, or empty: the first
  float scale[2] = {1.0f, 1.0f};
};

struct ModelWeights {
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t inner = 0;         // of the dense MLP, where a layer has no other
  int64_t expert_inner = 0;  // of an expert
  int64_t shared_inner = 0;  // of the expert that every row goes to
  int64_t heads = 0;
  int64_t kv_heads = 0;  // and the next two: where a layer has no other
  int64_t head_size = 0;
  // With a latent, qkv computes [queries or their latent][key dims that turn, of all heads][the latent of keys and
  // values], and kv_up of the normed latent gives each head [key dims that do not turn][value].
  // Where KV memory keeps the latent, layers have one KV head: its key is the dims that turn and the normed latent, its
  // value the latent. q_to_latent makes of a head's other query dims what the latent is multiplied by, and
  // v_from_latent makes a value of the latents that the head's weights have added up.
  int64_t latent = 0;  // 0: none
  bool keeps_latent = false;
  int64_t query_latent = 0;  // 0: qkv computes the queries themselves
  int64_t turning = 0;       // leading dims of a head that turn, where there is a latent
  int64_t value_size = 0;    // dims of a head's value; the head's size where there is no latent
  bool causal = true;
  bool gated = true;
  bool layer_norm = false;
  float eps = 0.0f;
  QkNorm qk_norm = QkNorm::kNone;
  bool unit_norms = false;  // of queries and keys, without weights
  Activation activation = Activation::kSilu;
  float gate_slope = 1.0f;  // see Opening, as the limit
  float gate_limit = 0.0f;
  float attention_scale = 1.0f;
  float attention_softcap = 0.0f;
  float growth = 0.0f;        // in layers that grow, queries are multiplied by 1 + growth * log(1 + steps) ...
  int64_t growth_tokens = 1;  // ... of so many tokens each
  int64_t growth_first = 1;   // position of the first token, for that
  float logit_softcap = 0.0f;
  float embedding_scale = 1.0f;
  float attention_factor = 1.0f;  // these multiply what a sublayer adds to the residual
  float recurrent_factor = 1.0f;
  float mlp_factor = 1.0f;
  int64_t top_k = 0;
  bool normalise_experts = false;
  bool sigmoid_experts = false;  // an expert's weight is the sigmoid of its score, not its softmax
  float expert_scale = 1.0f;     // multiplies the weights of the chosen experts
  float expert_margin = 0.0f;    // above 0: each choice is weighed by a softmax over scores that are near the best left
  bool scales_inputs = false;    // an expert's weight multiplies what it reads instead of what it computes
  int64_t expert_groups = 1;     // experts are chosen among those of the best groups
  int64_t top_groups = 1;
  int64_t group_best = 1;       // a group's rank is the sum of that of its best experts
  bool attention_gate = false;  // qkv gives a gate of each output of the attention besides, after the values
  RecurrentShape recurrent;     // of every recurrent layer
  StreamShape streams;
  std::vector<Product> stream_in, stream_out;  // of each stream but the first
  PackedView inputs_embed;                     // [tokens][layers * input size], the layers' own inputs of a token
  Product inputs_in;                           // of the embedding, to the same
  NormWeights inputs_norm;
  bool parallel = false;  // attention and MLP read the same rows and are added together
  // So many of the first layers add a part of a row's feature to their outcome (deepstack).
  int64_t feature_layers = 0;
  // The first layer's attention reads the second part of a row's feature as it is, then the normalised residual.
  bool paired = false;

  int64_t feature_size() const { return (1 + feature_layers + (paired ? 1 : 0)) * hidden; }

  PackedView embed;
  std::vector<float> positions;    // [count][hidden] learned positions, or empty
  std::vector<float> token_types;  // [count][hidden], or empty
  std::vector<float> distances;  // [heads][2 * reach + 1], added to scores by a key's distance -reach..reach, or empty
  std::vector<float> alibi;      // [heads]: what a score loses with each token of distance, up to reach, or empty
  int64_t reach = 0;             // beyond, a distance counts as the farthest
  NormWeights embed_norm;
  std::vector<Rope> ropes;
  std::vector<Layer> layers;
  NormWeights final_norm;
  Product head;
};

class Adapter;
enum class Site : int;

struct StepArgs {
  Kv* kv;
  int64_t rows;
  int64_t sequences;
  const int32_t* tokens;        // [rows]
  const int32_t* offsets;       // [sequences + 1]
  const int32_t* computed;      // [sequences]
  const int32_t* block_tables;  // [sequences][table_stride]
  int64_t table_stride;
  const int32_t* rope_variants;           // [sequences]
  States* states = nullptr;               // of a model with recurrent layers
  const int32_t* state_slots = nullptr;   // [sequences], each another
  const int32_t* state_trails = nullptr;  // [rows] another slot for the state after a row, -1: none; null: none has one
  const int32_t* second_texts = nullptr;  // [sequences] where token type 1 begins, -1: nowhere; null: nowhere in any
  // [feature_count][feature_size]: what some rows begin with instead of an embedding, then what layers add to them, or
  // what a paired layer reads beside them.
  const float* features = nullptr;
  const int32_t* feature_rows = nullptr;  // [rows] which of them, -1: the token's embedding; null: that in all rows
  int64_t feature_count = 0;
  const int32_t* spans = nullptr;   // [rows][2] first token and end of the span that a row is in; null: in none
  const int32_t* places = nullptr;  // [rows][3] what ropes turn by instead of the position; null: that in all rows
  int64_t wanted_count;
  const int32_t* wanted;  // [wanted_count], ascending rows
  float* out;             // [wanted_count][vocab], or [wanted_count][hidden]; with `answered` [answered_count][vocab]
  bool hidden;
  const Adapter* const* adapters = nullptr;  // those that sequences have, by slot
  int64_t adapter_count = 0;
  const int32_t* slots = nullptr;  // [sequences], -1: none; null: none has
  float* peaks = nullptr;         // [rows of out][vocab / kPeakBlock, rounded up]: of the logits, where they are wanted
  float* final_states = nullptr;  // [wanted_count][hidden]: what the logits are computed from, where it is wanted too
  float* kept = nullptr;  // [kept_count][rows][hidden]: what the layers of kept_layers, which ascend, begin with
  const int32_t* kept_layers = nullptr;
  int64_t kept_count = 0;
  // Beside final states: ascending places in `wanted` whose logits are computed; null: all.
  const int32_t* answered = nullptr;
  int64_t answered_count = 0;
};

// Where the time of steps goes. A reading of the clock ends one stage and begins the next.
enum class Stage : int { kEmbed, kPrepare, kQkv, kHeads, kAttention, kOutput, kUp, kDown, kRoute, kJoin, kHead };
constexpr int kStages = 11;
extern const char* const kStageNames[kStages];

class StageTimes {
 public:
  void start() { last_ = std::chrono::steady_clock::now(); }
  void end(Stage stage) {
    const auto now = std::chrono::steady_clock::now();
    seconds_[static_cast<int>(stage)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  double seconds(int stage) const { return seconds_[stage]; }

 private:
  std::chrono::steady_clock::time_point last_;
  double seconds_[kStages] = {};
};

class Model {
 public:
  // Throws std::invalid_argument when the weights do not fit together.
  Model(ModelWeights weights, Pool& pool, int64_t max_rows, const Kernels& kernels);

  const Kernels& kernels() const { return kernels_; }
  const ModelWeights& weights() const { return w_; }
  int64_t scratch_bytes() const;
  int64_t kv_layers() const;                                // at least 1, whatever the layers are
  int64_t state_floats() const;                             // of a slot of States; 0: no layer has a state
  const StageTimes& stage_times() const { return times_; }  // of all steps so far; not while one runs

  // Throws std::invalid_argument on rows, tokens or blocks that do not exist; then nothing was computed.
  void step(const StepArgs& args);

 private:
  struct Row {
    int32_t sequence;
    int32_t position;
  };

  void check_weights() const;
  void check_heads(const Layer& layer, const std::string& name) const;
  void check_recurrent() const;
  void check_streams() const;
  void check_step(const StepArgs& args) const;
  void check_states(const StepArgs& args) const;
  void spread_distances();
  void place_rows(const StepArgs& args);
  int64_t feature_size() const { return w_.feature_size(); }
  void embed_rows(const StepArgs& args);
  void add_features(const StepArgs& args, int64_t part);
  void keep_residual(const StepArgs& args, int64_t place) const;
  void pair_rows(const StepArgs& args, const Layer& layer);
  void rotate_tables(const StepArgs& args);
  void check_adapters(const StepArgs& args) const;
  void ready_adapters(const StepArgs& args);
  const LowRank* low_rank(const StepArgs& args, const Layer& layer, Site site, int64_t rows);
  void prepare(int64_t rows, const NormWeights& norm, const Product& product, const LowRank* low = nullptr);
  void fit_rows(int64_t rows, float* in, int64_t stride, int64_t width, const Product& product,
                const LowRank* low = nullptr);
  void multiply(const Product& product, const float* in, int64_t in_stride, int64_t rows, float* out,
                int64_t out_stride, const Opening* opening = nullptr, float* peaks = nullptr,
                const LowRank* low = nullptr);
  void multiply_tiled(const ProductArgs& args);
  int64_t qkv_outputs(const Layer& layer) const {
    const int64_t queries = w_.heads * (w_.latent > 0 ? w_.head_size : layer.head_size);
    if (layer.shares) return queries;
    if (w_.latent == 0) return queries * (w_.attention_gate ? 2 : 1) + 2 * layer.kv_heads * layer.head_size;
    return (w_.query_latent > 0 ? w_.query_latent : queries) + w_.turning + w_.latent;
  }
  int64_t widest(int64_t (*of)(const ModelWeights&, const Layer&)) const;
  void size_heads();
  void norm_latents(const NormWeights& norm, int64_t begin, int64_t width, int64_t rows);
  void raise(const NormWeights& norm, const Product& up, int64_t begin, int64_t width, int64_t rows, float* out,
             int64_t out_stride);
  void expand_latents(const Layer& layer, int64_t rows);
  void place_latents(const Layer& layer, int64_t rows);
  void raise_values(const Layer& layer, int64_t rows);
  void place_head(const Product& product, int64_t at, const float* values, int64_t width);
  void multiply_heads(const std::vector<Product>& products, int64_t rows, float* out, int64_t head_stride,
                      int64_t out_stride);
  template <typename ArgsOf>
  void multiply_several(int64_t count, const Product& first, const Opening* opening, const ArgsOf& args_of);
  void choose_near_best(const float* scores, int64_t count, int64_t row);
  void keep_best_groups(float* rank, int64_t count);
  void heads_of_rows(const StepArgs& args, const Layer& layer);
  void split_heads(const StepArgs& args, const Layer& layer, int64_t index);
  void attention(const StepArgs& args, const Layer& layer, int64_t index, int64_t rows);
  void gate_attention(const Layer& layer, int64_t rows);
  void recur(const StepArgs& args, const Layer& layer);
  void measure_steps(const Layer& layer, int64_t rows);
  void unit_keys(int64_t rows);
  void gate_rows(const Layer& layer, int64_t rows);
  void recurrent_output(const StepArgs& args, const Layer& layer, int64_t rows);
  void recur_rows(const StepArgs& args, const Layer& layer);
  void size_streams();
  float* stream(int64_t index) const { return streams_.data() + index * max_rows_ * hidden_pad_; }
  void multiply_normed(int64_t rows, const Product& product, float* out, int64_t out_stride,
                       const Opening* opening = nullptr);
  void multiply_narrowly(int64_t rows, const Product& product, const Opening* opening);
  void open_inputs(const StepArgs& args);
  void open_streams(const StepArgs& args);
  void route_streams(const StreamWeights& weights, int64_t rows);
  void predict_streams(const Layer& layer, int64_t rows);
  void add_normed(int64_t rows, const NormWeights& norm, float* out);
  void add_past(int64_t rows);
  void correct_streams(const Layer& layer, int64_t index, int64_t rows);
  void raise_input(const Layer& layer, int64_t index, int64_t rows);
  void add_input(const Layer& layer, int64_t index, int64_t rows);
  void keep_wanted_streams(const StepArgs& args);
  void close_streams(int64_t rows);
  void open_sparsely(const Layer& layer, int64_t rows);
  void feed_forward(const StepArgs& args, const Layer& layer, int64_t rows);
  void weigh_experts(const Layer& layer, int64_t rows);
  void mix_experts(const Layer& layer, int64_t rows);
  void feed_beside(const StepArgs& args, const Layer& layer, int64_t rows);
  void norm_joined(int64_t rows, const NormWeights& norm);
  void sigmoid(float* values, int64_t count) const;
  void add_shared(const Layer& layer, int64_t rows);
  void join(int64_t rows, const NormWeights& out_norm, const NormWeights& residual_norm, float factor);
  void keep_wanted(const StepArgs& args);
  void keep_states(const StepArgs& args, float* out);
  void results(const StepArgs& args);
  QuantisedRows quantised() const;
  Opening opening_of(int64_t width) const { return {w_.activation, w_.gated, width, w_.gate_slope, w_.gate_limit}; }
  uint8_t* product_scratch_of(int thread) { return product_scratch_.data() + thread * product_stride_; }
  bool tiles(int64_t rows) const;  // whether the codes of a step's rows lie in tile order
  bool changes_rows(const Product& product) const;
  void fit_row(float* row, int64_t width, const Product& product, int64_t at, int thread, bool tiled);
  const Rotation* rotation_of(const PackedView& weights);

  ModelWeights w_;
  std::map<int64_t, Rotation> rotations_;  // by width
  const Rotation* embed_rotation_ = nullptr;
  StageTimes times_;
  Pool& pool_;
  const Kernels& kernels_;
  int64_t max_rows_;
  int64_t expert_rows_ = 0;  // rows of the expert buffers
  int64_t hidden_pad_, q_pad_, qkv_pad_, inner_pad_, tile_rows_;
  int64_t latents_pad_ = 0, expanded_pad_ = 0, head_pad_ = 0;

  std::vector<Row> row_;                                         // of every row of the step
  std::vector<AttentionRow> asking_;                             // rows whose attention is computed
  std::vector<int32_t> expert_of_, expert_order_, expert_slot_;  // [rows * top_k], and the inverse order
  std::vector<int64_t> expert_begin_;
  std::vector<float> expert_rank_;  // [2][experts] of one row: by which they are chosen, and those near the best
  std::vector<float> group_rank_;   // [groups]
  Buffer<float> residual_, normed_, qkv_, latents_, expanded_, raised_, attended_, inner_, joined_, attention_out_;
  Buffer<float> pairs_;  // [rows]: what a paired layer reads
  int64_t pairs_pad_ = 0;
  Buffer<float> head_rows_, head_scales_;  // [heads][rows]: what products by head read
  Buffer<int8_t> head_codes_;
  Buffer<int32_t> head_sums_;
  int64_t head_code_stride_ = 64, head_group_stride_ = 1;
  Buffer<float> mixed_, recurred_, steps_;  // of recurrent layers: `in`, `out`, and decays and steps of each head
  int64_t mixed_pad_ = 0, recurred_pad_ = 0;
  // Of streams: all of them, one after the other; each layer's inputs; the narrow path's outcome, and what is in it.
  Buffer<float> streams_, layer_inputs_, past_, narrow_;
  Buffer<float> raw_;  // gates and values, before they are opened sparsely
  int64_t inputs_pad_ = 0, narrow_pad_ = 0, raw_pad_ = 0;
  const Rotation* inputs_rotation_ = nullptr;
  Buffer<float> router_, expert_weight_, expert_out_, expert_in_;
  bool has_adapters_ = false;                   // the step
  std::vector<const LowRankView*> low_of_row_;  // of the rows of one product
  Buffer<float> low_values_;
  LowRank low_;
  Buffer<float> cosines_, sines_;  // [ropes][rows][half head]
  Buffer<float> bias_;             // [heads][bias_stride_], as attend() takes it
  int64_t bias_stride_ = 0, bias_reach_ = 0;
  Buffer<float> attention_scratch_, row_scratch_;
  Buffer<uint8_t> product_scratch_;
  Buffer<int8_t> codes_, row_codes_;
  Buffer<float> code_scales_;
  Buffer<int32_t> code_sums_;
  int64_t code_stride_ = 0, group_stride_ = 0, half_pad_ = 0;
  int64_t attention_stride_ = 0, row_scratch_stride_ = 0, product_stride_ = 0;
};

// Zeroes what rows of a buffer that layers share may hold beyond `width`, up to what products may read.
void clear_beyond(float* values, int64_t stride, int64_t rows, int64_t width);
// Panels of what a product stores: gates and the values that they open become one.
int64_t result_panels(const Product& product, const Opening* opening);
// Panels of one hand-out, where `all` are handed out for products of `panels` each: enough hand-outs for an even end,
// few enough that handing out costs nothing, and by twos where that leaves enough, since an integer product takes two
// at once, as a gated one does anyway.
int64_t panel_grain(const Product& product, const Opening* opening, int64_t panels, int64_t all, int threads);

// Products of one shape as one hand-out: an item is a product and a panel of it. `args_of` gives the rows of each.
template <typename ArgsOf>
void Model::multiply_several(int64_t count, const Product& first, const Opening* opening, const ArgsOf& args_of) {
  const int64_t panels = result_panels(first, opening);
  const int64_t grain = panel_grain(first, opening, panels, count * panels, pool_.threads());
  pool_.run(count * panels, grain, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t item = begin; item < end;) {
      const int64_t last = std::min(end, (item / panels + 1) * panels);
      const int64_t first_panel = item % panels;
      ProductArgs args = args_of(item / panels);
      args.opening = opening;
      args.others = (pool_.threads() - 1) * grain;
      if (args.row_count > 0) {
        kernels_.product(args, first_panel, first_panel + (last - item), product_scratch_of(thread));
      }
      item = last;
    }
  });
}

}  // namespace headrace
