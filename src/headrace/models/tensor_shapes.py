"""Lists the canonical tensors of a ModelSpec with their shapes, and says which of them a precision is chosen for.

Reads no files.
"""

from __future__ import annotations

from typing import Final

from headrace.models.spec import ExpertSpec, LayerInputSpec, LayerSpec, ModelSpec, RecurrentSpec, StreamSpec

Shapes = dict[str, tuple[int, ...]]

_PRODUCTS: Final = frozenset(
    {"qkv", "q_up", "kv_up", "q_to_latent", "v_from_latent", "o", "gate_up", "up", "down", "in", "out"}
)


def tensor_shapes(spec: ModelSpec) -> Shapes:
    """Return the shape of every canonical tensor in load order: [outputs, inputs] for products.

    `qkv` has q, then k, then v rows; `gate_up` has gate, then up rows.
    """
    table = _ShapeTable(spec)
    table.add_inputs()
    for index, layer in enumerate(spec.layers):
        table.add_layer(f"layers.{index}", layer)
    table.add_outputs()
    return table.shapes


class _ShapeTable:
    def __init__(self, spec: ModelSpec) -> None:
        self.shapes: Shapes = {}
        self._spec = spec
        self._hidden = spec.hidden_size

    def add_inputs(self) -> None:
        """Add the tensors before the first layer."""
        spec, hidden, shapes = self._spec, self._hidden, self.shapes
        if spec.has_embedding:
            shapes["embed"] = (spec.vocab_size, hidden)
        if spec.learned_positions:
            shapes["positions"] = (spec.position_offset + spec.learned_positions, hidden)
        if spec.token_types:
            shapes["token_types"] = (spec.token_types, hidden)
        if spec.embedding_norm:
            self._norm("embed_norm")
        if spec.distance_buckets:
            shapes["distances"] = (spec.distance_buckets, spec.heads)
        if (inputs := spec.layer_inputs) is not None:
            width = len(spec.layers) * inputs.size
            shapes["inputs.embed"] = (inputs.vocab, width)
            shapes["inputs.in"] = (width, hidden)
            shapes["inputs.norm"] = (inputs.size,)
        if (streams := spec.streams) is not None:
            for index in range(streams.count - 1):
                shapes[f"streams.{index}.in"] = shapes[f"streams.{index}.out"] = (hidden, hidden)

    def add_layer(self, name: str, layer: LayerSpec) -> None:
        spec = self._spec
        if layer.mixer != "none":
            self._sublayer_norms(f"{name}.attn", before=layer.attn_norm)
        if layer.recurs and spec.recurrent is not None:
            self.shapes.update(_recurrent_shapes(spec.recurrent, f"{name}.recurrent", self._hidden))
        if layer.attends:
            self._attention(f"{name}.attn", layer)
        if spec.streams is not None:
            self.shapes.update(_stream_shapes(spec.streams, name, self._hidden))
        if spec.layer_inputs is not None:
            self.shapes.update(_input_shapes(spec.layer_inputs, name, self._hidden))
        if spec.layer_scale:
            self.shapes[f"{name}.scale"] = (1,)
        if not layer.mlp:
            return
        self._sublayer_norms(f"{name}.mlp", before=not spec.shared_norm)
        experts = spec.experts if layer.experts else None
        if experts is not None:
            self._experts(f"{name}.mlp", experts)
        if experts is None or experts.beside:
            self._mlp(f"{name}.mlp", spec.inner_size(layer), bias=spec.mlp_bias)

    def add_outputs(self) -> None:
        """Add the tensors after the last layer."""
        spec = self._spec
        if spec.final_norm:
            self._norm("norm")
        if spec.kind == "decoder" and not spec.tied:
            self.shapes["head"] = (spec.vocab_size, self._hidden)
        if spec.kind == "decoder" and spec.head_bias:
            self.shapes["head.bias"] = (spec.vocab_size,)
        for index, layer in enumerate(spec.pooled_layers):
            self._product(f"pooled.{index}", layer.outputs, layer.inputs, bias=layer.bias)
            if layer.norm:
                self._norm(f"pooled.{index}.norm", layer.outputs)

    def _norm(self, name: str, size: int | None = None) -> None:
        size = self._hidden if size is None else size
        self.shapes[name] = (size,)
        if self._spec.norm == "layer" and self._spec.norm_bias:
            self.shapes[f"{name}.bias"] = (size,)

    def _sublayer_norms(self, name: str, *, before: bool) -> None:
        if self._spec.pre_norm and before:
            self._norm(f"{name}.norm")
        if self._spec.out_norm:
            self._norm(f"{name}.out_norm")
        if self._spec.residual_norm:
            self._norm(f"{name}.residual_norm")

    def _product(self, name: str, outputs: int, inputs: int, *, bias: bool) -> None:
        self.shapes[name] = (outputs, inputs)
        if bias:
            self.shapes[f"{name}.bias"] = (outputs,)

    def _mlp(self, name: str, inner: int, *, bias: bool) -> None:
        if self._spec.gated:
            self._product(f"{name}.gate_up", 2 * inner, self._hidden, bias=bias)
        else:
            self._product(f"{name}.up", inner, self._hidden, bias=bias)
        self._product(f"{name}.down", self._hidden, inner, bias=bias)

    def _experts(self, name: str, experts: ExpertSpec) -> None:
        self._product(f"{name}.router", experts.count, self._hidden, bias=experts.bias)
        if experts.correction:
            self.shapes[f"{name}.router_bias"] = (experts.count,)
        for expert in range(experts.count):
            self._mlp(f"{name}.experts.{expert}", experts.intermediate_size, bias=experts.bias)
        if experts.shared_size:
            self._mlp(f"{name}.shared", experts.shared_size, bias=False)
        if experts.shared_gate:
            self.shapes[f"{name}.shared_gate"] = (1, self._hidden)
        if experts.beside:
            self.shapes[f"{name}.router_norm"] = (self._hidden,)
            self.shapes[f"{name}.expert_scales"] = (experts.count,)
            for kind in ("experts_norm", "experts_out_norm", "dense_out_norm"):
                self._norm(f"{name}.{kind}")

    def _attention(self, name: str, layer: LayerSpec) -> None:
        spec, shapes = self._spec, self.shapes
        shares = layer.shares is not None
        kv_heads, size, value_size = spec.head_shape(layer)
        q_size = spec.heads * size
        rows = q_size if shares else sum(spec.qkv_parts_of(layer))
        self._product(f"{name}.qkv", rows, (1 + layer.paired) * self._hidden, bias=spec.qkv_bias)
        if (latent := spec.latent) is not None:
            if latent.query_rank:
                shapes[f"{name}.q_latent_norm"] = (latent.query_rank,)
                shapes[f"{name}.q_up"] = (q_size, latent.query_rank)
            shapes[f"{name}.kv_latent_norm"] = (latent.rank,)
            plain = size - latent.turning
            if latent.kept:
                shapes[f"{name}.q_to_latent"] = (spec.heads * latent.head_rows(latent.rank), plain)
                shapes[f"{name}.v_from_latent"] = (spec.heads * latent.head_rows(latent.value_size), latent.rank)
            else:
                shapes[f"{name}.kv_up"] = (spec.heads * (plain + latent.value_size), latent.rank)
        if spec.qk_norm == "head":
            shapes[f"{name}.q_norm"] = (size,)
            if not shares:
                shapes[f"{name}.k_norm"] = (size,)
        elif spec.qk_norm in ("full", "each_head"):
            shapes[f"{name}.q_norm"], shapes[f"{name}.k_norm"] = (q_size,), (kv_heads * size,)
        if spec.sinks:
            shapes[f"{name}.sinks"] = (spec.heads,)
        self._product(f"{name}.o", self._hidden, spec.heads * value_size, bias=spec.o_bias)


def _recurrent_shapes(spec: RecurrentSpec, name: str, hidden: int) -> Shapes:
    rows = sum(spec.in_parts)
    shapes: Shapes = {f"{name}.in": (rows, hidden)}
    if spec.bias:
        shapes[f"{name}.in.bias"] = (rows,)
    shapes[f"{name}.conv"] = (spec.channels * spec.taps,)  # the taps of a channel side by side
    if spec.conv_bias:
        shapes[f"{name}.conv.bias"] = (spec.channels,)
    if spec.kind != "short_conv":
        shapes[f"{name}.step_bias"] = shapes[f"{name}.decay"] = (spec.heads,)
    if spec.kind == "scan":
        shapes[f"{name}.skip"] = (spec.heads,)
    if spec.norm_groups:
        shapes[f"{name}.norm"] = (spec.inner // spec.norm_groups if spec.shared_norm else spec.inner,)
    shapes[f"{name}.out"] = (hidden, spec.inner)
    if spec.bias:
        shapes[f"{name}.out.bias"] = (hidden,)
    return shapes


def _stream_shapes(spec: StreamSpec, name: str, hidden: int) -> Shapes:
    return {
        f"{name}.streams.router_norm": (hidden,),
        f"{name}.streams.router": (spec.count, hidden),
        f"{name}.streams.predict": (spec.count**2, spec.count),
        f"{name}.streams.correct": (spec.count, spec.count),
        f"{name}.streams.out_scale": (hidden,),
        f"{name}.past.in": (spec.rank, hidden),
        f"{name}.past.out": (hidden, spec.rank),
        f"{name}.past.norm": (hidden,),
    }


def _input_shapes(spec: LayerInputSpec, name: str, hidden: int) -> Shapes:
    return {
        f"{name}.inputs.in": (spec.size, hidden),
        f"{name}.inputs.out": (hidden, spec.size),
        f"{name}.inputs.norm": (hidden,),
    }


def is_kept_exact(name: str) -> bool:
    """Return whether a matrix is always f32: routers and layers after pooling are small, and errors in them count."""
    return name.endswith((".router", ".shared_gate")) or (name.startswith("pooled.") and name.count(".") == 1)


def is_product(name: str) -> bool:
    """Return whether a precision can be chosen for a tensor: products, the embedding and the head."""
    leaf = name.rsplit(".", 1)[-1]
    return leaf in _PRODUCTS or name in {"embed", "head", "inputs.embed"}
