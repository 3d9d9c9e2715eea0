"""Describes a decoder or an encoder: ModelSpec. The names and shapes of its tensors are in tensor_shapes.

Does not know files, Hugging Face names (see families) or how a step is computed (see the executors). A layer computes
these sublayers in order; norms in brackets are optional:

    h = [pre_norm] x            q, k, v = qkv(h)            q, k = [qk_norm] q, k        rope
    y = o(attention)            x = [residual_norm](x + [out_norm] y)
    h = [pre_norm] x            y = down(act(gate(h)) * up(h))
                                x = [residual_norm](x + [out_norm] y)

With `parallel`, both sublayers read the layer's input, and their outputs are added to it together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

NormKind = Literal["rms", "layer"]
PlainActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu", "quick_gelu"]
Activation = PlainActivation | Literal["clamped_silu"]  # gated only: act(gate) * (up + 1), both clamped (gpt-oss)
QkNorm = Literal["none", "head", "full", "each_head", "unit"]
Pooling = Literal["mean", "cls", "last", "max", "weighted", "mean_sqrt"]
PooledActivation = PlainActivation | Literal["identity", "tanh", "sigmoid"]
ScoreActivation = Literal["sigmoid", "identity"]
ModelKind = Literal["decoder", "encoder", "reranker"]
Mixer = Literal["attention", "recurrent", "both", "none"]
PANEL: Final = 32  # output channels side by side in the core's layout

RecurrentKind = Literal["short_conv", "scan", "delta"]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions of one kind of layer: angle = position * inv_freq[i] for the pair (i, i + len(inv_freq)).

    A long-context model (longrope) has a second table. The choice between them is made at admission, from the maximum
    tokens of the sequence, and never changes: logits must not depend on batching.
    """

    inv_freq: tuple[float, ...]  # every value exact in f32; 2 * len(inv_freq) <= head_size leading dims are rotated
    scale: float = 1.0  # multiplies cos and sin (the attention factor of yarn and longrope)
    long_inv_freq: tuple[float, ...] | None = None  # for sequences that may pass original_context
    long_scale: float = 1.0
    original_context: int = 0  # tokens; 0 without a long table
    # By pair, which number of a token's place (see `image_places`) it turns by, where that is no position; empty: the
    # first.
    axes: tuple[int, ...] = ()


class RecurrentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The recurrent layers of a model: they carry a state of fixed size from token to token, and no keys and values.

    The product `in` gives, by kind, with `conv` a convolution over time and `out` the product after all of it:

        short_conv  [b][c][x]                 y = c * conv(b * x)                                            (LFM2)
        scan        [z][x, B, C][dt]          x, B, C = silu(conv(x, B, C)); y = norm(ssm(x, B, C, dt) * silu(z))
                                                                                                             (Mamba-2)
        delta       [q, k, v][z][beta][dt]    q, k, v = silu(conv(q, k, v)); y = norm(delta(q, k, v, ...)) * silu(z)
                                                                                                             (Qwen3-Next)
    """

    kind: RecurrentKind
    taps: int  # inputs that the convolution sees, the current one included
    heads: int = 1  # of values
    groups: int = 0  # of heads with the same B and C, or the same query and key
    head_size: int  # dims of a head's value
    state_size: int = 0  # dims of B and C, or of a key
    conv_bias: bool = False
    bias: bool = False  # of both products
    norm_groups: int = 0  # parts of a row that are normalised on their own; 0: no norm
    norm_first: bool = False  # values are normalised before they are gated, not after
    shared_norm: bool = False  # the parts have the same weights
    eps: float = 0.0
    step_least: float = 0.0  # bounds of a step (dt); scan
    step_most: float = math.inf
    in_factors: tuple[float, ...] = ()  # multiply what `in` gives, by part; (): nothing

    @property
    def inner(self) -> int:
        """Values of a row, all heads together."""
        return self.heads * self.head_size

    @property
    def in_parts(self) -> tuple[int, ...]:
        """Rows of `in` that belong together."""
        keys = self.groups * self.state_size
        match self.kind:
            case "short_conv":
                return (self.inner,) * 3
            case "scan":
                return (self.inner, self.inner, keys, keys, self.heads)
            case "delta":
                return (keys, keys, self.inner, self.inner, self.heads, self.heads)

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def state_floats(self) -> int:
        """Numbers in the state of a layer, as the core holds it: in whole lanes."""
        return (self.taps - 1) * _lanes(self.channels) + self.heads * self.state_size * _lanes(self.head_size)


def _lanes(count: int) -> int:
    return -(-count // 16) * 16


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    mixer: Mixer = "attention"  # its first sublayer; "both" read the same rows and are added together
    mlp: bool = True  # False: it has no second sublayer
    # Tokens that a query sees up to itself, and without a causal mask as many from itself on; 0: all.
    window: int = 0
    chunk: int = 0  # a query sees tokens from the last multiple of this on; 0: all
    rope: int | None = 0  # index into ModelSpec.ropes; None: the layer has no positions (SmolLM3)
    experts: bool = False  # a mixture of experts instead of the dense MLP
    qk_norm: bool = True  # with a `qk_norm` of the model
    shares: int | None = None  # the earlier layer whose keys and values it reads; it has queries alone
    gate_cutoff: float | None = None  # gates count above the mean of their row by so many deviations; None: all
    grows: bool = False  # queries grow with their position: see `query_growth`
    spans: bool = False  # a row sees only the span that it is in: a window of an image's patches
    kept: bool = False  # its outcome is a result beside the last layer's (the towers of Qwen3-VL)
    # Its attention reads the second part of a row's feature as it is, beside the normalised residual. Only of the first
    # layer (EAGLE-3).
    paired: bool = False
    attn_norm: bool = True  # with `pre_norm`; False: the attention reads its input as it is (ModernBERT's first layer)
    # Sizes of this layer; 0: those of the model.
    head_size: int = 0
    kv_heads: int = 0
    inner: int = 0  # of the dense MLP
    keys_as_values: bool = False  # its values are its keys, before those are normalised and turned

    @property
    def attends(self) -> bool:
        return self.mixer in ("attention", "both")

    @property
    def recurs(self) -> bool:
        return self.mixer in ("recurrent", "both")


class ExpertSpec(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    top_k: int
    intermediate_size: int
    normalise: bool  # rescale the chosen experts' weights to sum to one
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # turns the router's scores into weights
    correction: bool = False  # a bias by expert is added to the weights when experts are chosen
    scale: float = 1.0  # multiplies the weights of the chosen experts
    shared_size: int = 0  # inner size of an expert that every token goes to; 0: none
    shared_gate: bool = False  # that expert's output has a weight of its own, a sigmoid
    # Above 0: experts are chosen one by one, each weighed by a softmax over scores near the best of those left.
    margin: float = 0.0
    scales_inputs: bool = False  # an expert's weight multiplies what it reads instead of what it computes
    groups: int = 1  # experts are chosen among those of the `top_groups` best groups
    top_groups: int = 1
    group_best: Literal[1, 2] = 1  # a group's rank is the sum of that of so many of its best experts
    bias: bool = False  # of the router and of every expert
    # The layer's dense MLP is there too. Both read the residual, each through a norm of its own; what they compute is
    # normalised and added. The chosen experts' weights are multiplied by a scale of each expert (Gemma 4).
    beside: bool = False


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values, and maybe queries, that are computed from narrow latents (DeepSeek-V2 and V3).

    `qkv` gives queries or their latent, then key dims that turn, which all heads share, then the latent of keys and
    values. `kv_up` of the normalised latent gives each head the other dims of its key, then its value.

    With `kept`, KV memory holds the key dims that turn and the normalised latent, once for all heads. `q_to_latent`
    makes of a head's other query dims what the latent is multiplied by, and `v_from_latent` makes its value of the
    latents that its weights have added up.
    """

    rank: int
    query_rank: int = 0  # 0: queries have no latent
    turning: int  # leading dims of a head that the rope turns
    value_size: int  # of a head
    kept: bool = True

    def head_rows(self, outputs: int) -> int:
        """Return the rows of a head in a product by head: whole panels."""
        return -(-outputs // PANEL) * PANEL


class LayerInputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An input of each layer's own, which is added to the residual after its MLP (Gemma 3n and 4).

    The inputs of all layers come from a second embedding, and from a product of the first.
    """

    size: int
    vocab: int  # tokens in the second embedding; others have the inputs of token 0


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Several residual streams for each token, which need `layer_inputs` (Gemma 3n).

    A layer predicts all streams, computes the first one, and corrects all of them by the result. A narrow path leads
    past its attention.
    """

    count: int
    rank: int  # of the narrow path


class PooledLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer after pooling: y = [norm](activation(W x + b)). Its norm is a layer norm."""

    inputs: int
    outputs: int
    bias: bool = True
    activation: PooledActivation = "identity"
    norm: bool = False


class RankingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a reranker reads a query and a document, and what its number means."""

    template: Literal["pair", "qwen3"]  # the tokenizer's own pair of texts, or the prompt of Qwen3-Reranker
    activation: ScoreActivation  # turns the number into the score
    typed: bool = False  # the second text's tokens have another type

    def score(self, vector: Sequence[float]) -> float:
        """Return the score of what the model computed: one number, or a logit against and one for."""
        return _logit(vector) if self.activation == "identity" else self.probability(vector)

    def probability(self, vector: Sequence[float]) -> float:
        """Return the score from 0 to 1, whatever the model's own activation is."""
        logit = _logit(vector)
        grown = math.exp(-abs(logit))  # of a large one it would overflow
        return (1.0 if logit >= 0 else grown) / (1.0 + grown)


def _logit(vector: Sequence[float]) -> float:
    return vector[-1] - (vector[0] if len(vector) > 1 else 0.0)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    family: str  # "llama", "qwen", ...
    architecture: str  # the Hugging Face class name, for messages
    # An encoder has no head: it makes embeddings only. A reranker gives a pair of texts one number.
    kind: ModelKind = "decoder"
    causal: bool = True  # a token sees those before it; otherwise all of its text
    feature_layers: int = 0  # so many of the first layers add a part of an image's feature to their outcome (Qwen3-VL)
    image_span: int = 0  # tokens of an image, which see each other whatever their order; 0: they see those before

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense MLP; 0 when every layer is a mixture of experts
    heads: int
    kv_heads: int
    head_size: int
    layers: tuple[LayerSpec, ...]
    context: int  # maximum positions

    norm: NormKind = "rms"
    norm_eps: float
    norm_bias: bool = True  # of layer norms
    norm_offset: float = 0.0  # added to norm weights at load (Gemma stores w - 1)
    pre_norm: bool = True
    parallel: bool = False  # the MLP reads what the attention reads
    shared_norm: bool = False  # with `parallel`: one norm for both
    out_norm: bool = False  # normalise the sublayer's output before adding it to the residual (Gemma, OLMo-2)
    residual_norm: bool = False  # normalise the residual after adding the sublayer (BERT)
    final_norm: bool = True
    latent: LatentSpec | None = None
    recurrent: RecurrentSpec | None = None  # of the layers with that mixer
    layer_inputs: LayerInputSpec | None = None
    streams: StreamSpec | None = None
    layer_scale: bool = False  # the residual is multiplied by a number of each layer after it
    value_norm: bool = False  # values are normalised over each head's dims, without weights
    attention_gate: bool = False  # `qkv` also gives a gate of each output of the attention, after the values
    # "head": over each head's dims; "full": over all heads' dims at once; "each_head": a layer norm for each head;
    # "unit": over each head's dims, without weights
    qk_norm: QkNorm = "none"

    activation: Activation = "silu"
    gate_slope: float = 1.0  # act(slope * gate); of "clamped_silu": gate * sigmoid(slope * gate)
    gate_limit: float = 0.0  # of "clamped_silu": gates are at most this, values within it on both sides
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    ropes: tuple[RopeSpec, ...] = ()
    attention_scale: float
    attention_softcap: float = 0.0  # 0: none
    # Where `grows` is set, queries are multiplied by 1 + query_growth * log(1 + (position + first) // growth_tokens).
    query_growth: float = 0.0
    growth_tokens: int = 1
    growth_first: int = 1  # position of the first token
    sinks: bool = False  # a learned score of each head takes weight in the softmax and adds no value (gpt-oss)
    logit_softcap: float = 0.0  # 0: none
    logit_scale: float = 1.0  # multiplies the weights of the final norm, and so the logits
    embedding_scale: float = 1.0
    # Multiply what a sublayer adds to the residual.
    attention_factor: float = 1.0
    recurrent_factor: float = 1.0
    mlp_factor: float = 1.0
    tied: bool = False  # the output head is the embedding
    has_embedding: bool = True  # False: rows begin with features alone (the tower of an image)
    experts: ExpertSpec | None = None

    learned_positions: int = 0
    position_offset: int = 0  # rows of the files' table before the position of the first token (RoBERTa)
    alibi: tuple[float, ...] = ()  # what a head's score loses with each token of distance, instead of a rope
    head_bias: bool = False

    # Encoders only, but for `embedding_norm`.
    token_types: int = 0
    embedding_norm: bool = False
    distance_buckets: int = 0  # a score has a bias by its key's distance, in buckets (MPNet)
    max_distance: int = 0  # beyond, distances share a bucket
    # Of embeddings; None: nothing says, and the mean is taken.
    pooling: Pooling | None = None
    normalise_embedding: bool = False  # unit length after pooling
    pooled_layers: tuple[PooledLayer, ...] = ()  # between pooling and unit length
    score_tokens: tuple[int, ...] = ()  # a reranker's only pooled layer is these rows of the output head
    ranking: RankingSpec | None = None  # of a reranker

    @property
    def embeds(self) -> bool:
        """True if the model is made for embeddings, or to rerank by one."""
        return self.kind != "decoder" or self.pooling is not None

    @property
    def vector_size(self) -> int:
        """Numbers in an embedding."""
        return self.pooled_layers[-1].outputs if self.pooled_layers else self.hidden_size

    @property
    def paired(self) -> bool:
        return self.layers[0].paired

    @property
    def feature_size(self) -> int:
        """Numbers in the feature of an image's token, or of a row of paired layers."""
        return (1 + self.feature_layers + self.paired) * self.hidden_size

    @property
    def has_places(self) -> bool:
        """Whether ropes turn by a token's place in an image, where it is in one."""
        return any(rope.axes for rope in self.ropes)

    @property
    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Return KV heads, dims of a key and dims of a value of each layer in the KV memory.

        These are the layers with attention, and at least one, because blocks also name prefixes. Without a causal mask
        a sequence is computed in one piece, and layers take turns with the memory of one.
        """
        own = [self.kv_shape(layer) for layer in self.layers if layer.attends and layer.shares is None]
        own = own or [self.kv_shape(LayerSpec())]
        return tuple(own if self.causal else own[:1])

    @property
    def values_in_keys(self) -> bool:
        """True if values are the last dims of keys, and KV memory has them once."""
        return self.latent is not None and self.latent.kept

    @property
    def kv_numbers(self) -> int:
        """Numbers that KV memory holds of a token."""
        return sum(heads * (key + (0 if self.values_in_keys else value)) for heads, key, value in self.kv_shapes)

    @property
    def kv_layers(self) -> int:
        """Layers in the KV memory."""
        return len(self.kv_shapes)

    def kv_shape(self, layer: LayerSpec) -> tuple[int, int, int]:
        """Return a layer's heads in KV memory, and the dims of a key and of a value."""
        if (latent := self.latent) is not None and self.values_in_keys:
            return 1, latent.turning + latent.rank, latent.rank
        return self.head_shape(layer)

    def head_shape(self, layer: LayerSpec) -> tuple[int, int, int]:
        """Return the heads of a layer's keys, and the dims of a head's query and key, and of its value."""
        size = layer.head_size or self.head_size
        return layer.kv_heads or self.kv_heads, size, size if self.latent is None else self.latent.value_size

    @property
    def state_floats(self) -> int:
        """Numbers in the recurrent state of a sequence; 0 if no layer has one."""
        each = 0 if self.recurrent is None else self.recurrent.state_floats
        return each * sum(layer.recurs for layer in self.layers)

    @property
    def kv_reads(self) -> float:
        """How often a step reads what the KV memory holds of a token: more than once where layers share it."""
        held = sum(heads * (key + value) for heads, key, value in self.kv_shapes)
        shapes = (self.kv_shape(layer) for layer in self.layers if layer.attends)
        return sum(heads * (key + value) for heads, key, value in shapes) / held

    @property
    def pair_size(self) -> int:
        """Dims that attention multiplies for a token and one that it sees, in all layers."""
        shapes = (self.kv_shape(layer) for layer in self.layers if layer.attends)
        return sum(self.heads * (key + value) for _, key, value in shapes)

    def inner_size(self, layer: LayerSpec) -> int:
        """Return the inner size of a layer's dense MLP."""
        return layer.inner or self.intermediate_size

    @property
    def same_layers(self) -> bool:
        """True if no layer has sizes of its own."""
        return not any(layer.head_size or layer.kv_heads or layer.inner for layer in self.layers)

    @property
    def q_size(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def value_size(self) -> int:
        """Dims of a head's value, where a layer has no size of its own."""
        return self.head_size if self.latent is None else self.latent.value_size

    @property
    def qkv_parts(self) -> tuple[int, ...]:
        """Rows of `qkv` that belong together, in a layer without sizes of its own."""
        return self.qkv_parts_of(LayerSpec())

    def qkv_parts_of(self, layer: LayerSpec) -> tuple[int, ...]:
        """Return the rows of `qkv` that belong together: of queries, keys and values, or of queries and the latent."""
        kv_heads, size, _ = self.head_shape(layer)
        queries, keys = self.heads * size, kv_heads * size
        if self.latent is None:
            return (queries, keys, keys, *((queries,) if self.attention_gate else ()))
        return (self.latent.query_rank or self.q_size, self.latent.turning + self.latent.rank)

    def rope_variant(self, total_tokens: int) -> int:
        """Return 1 if a sequence of up to `total_tokens` must use the long rope tables, else 0."""
        return int(any(r.long_inv_freq is not None and total_tokens > r.original_context for r in self.ropes))
