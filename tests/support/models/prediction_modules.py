"""Tiny checkpoints with a prediction module of their own, and what torch computes from it.

transformers runs no prediction modules, so the reference is put together here from the published definition: the
module's layer is an ordinary layer of its family, and what stands before it is two norms and a product.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.models.tiny_models import TINY, randomise, write_tokenizer

_LISTS = ("layer_types", "mlp_layer_types")  # of a config, with an entry for each layer


@dataclass
class Checkpoint:
    folder: Path
    model: Any  # without the module
    module: Any  # its layer between the model's embedding and head, as a model of one layer
    token_norm: Any
    state_norm: Any
    join: torch.Tensor

    def states(self, tokens: list[int]) -> torch.Tensor:
        """What the model's head reads at every token."""
        with torch.no_grad():
            return self.model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    def features(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        """What the module's layer reads for tokens and the states before them."""
        with torch.no_grad():
            embedded = self.model.get_input_embeddings()(torch.tensor(tokens))
            return torch.cat([self.token_norm(embedded), self.state_norm(states)], dim=-1) @ self.join.T

    def outcome(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The module's states and logits."""
        with torch.no_grad():
            states = self.module.model(inputs_embeds=features[None], use_cache=False).last_hidden_state[0]
            return states, self.module.lm_head(states)

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Of the tokens two places after each but the last."""
        return self.outcome(self.features(tokens[1:], self.states(tokens)[:-1]))[1].numpy()

    def drafts(self, tokens: list[int], count: int, *, first: int) -> list[int]:
        """The likeliest `count` tokens after these, if the module knows the states from token `first` on."""
        features = self.features(tokens[first + 1 :], self.states(tokens)[first:-1])
        found: list[int] = []
        while len(found) < count:
            states, logits = self.outcome(features)
            found.append(int(logits[-1].argmax()))
            features = torch.cat([features, self.features(found[-1:], states[-1:])])
        return found


def build_checkpoint(name: str, folder: Path) -> Checkpoint:
    """Write a tiny model whose last layer becomes the layer of its prediction module."""
    torch.manual_seed(77)
    tiny = TINY[name]
    config = tiny.config()
    config._attn_implementation = "eager"
    layers = config.num_hidden_layers
    _lengthen(config)
    whole = getattr(transformers, tiny.architecture)(config).to(torch.float32).eval()
    randomise(whole)
    norms = [copy.deepcopy(whole.model.norm) for _ in range(3)]
    for norm in norms:
        norm.weight.data += 0.3 * torch.randn_like(norm.weight)
    join = 0.2 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    model, module = copy.deepcopy(whole), copy.deepcopy(whole)
    _keep_layers(model, slice(layers))
    _keep_layers(module, slice(layers, None))
    module.model.norm = norms[2]
    whole.save_pretrained(folder)
    write_tokenizer(folder)
    parts = [norms[0].weight.data, norms[1].weight.data, join, norms[2].weight.data]
    _name_module(folder, layers, config.model_type.startswith("qwen"), parts)
    return Checkpoint(folder, model, module, norms[0], norms[1], join)


def _lengthen(config: Any) -> None:
    """Add a layer of attention."""
    config.num_hidden_layers += 1
    for name in _LISTS:
        if entries := getattr(config, name, None):
            setattr(config, name, [*entries, "full_attention" if name == "layer_types" else entries[-1]])


def _keep_layers(model: Any, kept: slice) -> None:
    model.model.layers = model.model.layers[kept]
    model.config.num_hidden_layers = len(model.model.layers)
    for name in _LISTS:
        if entries := getattr(model.config, name, None):
            setattr(model.config, name, entries[kept])


def _name_module(folder: Path, layers: int, is_qwen: bool, parts: list[torch.Tensor]) -> None:
    """Store the last layer and the parts before it under the names that checkpoints use."""
    stem = "mtp" if is_qwen else f"model.layers.{layers}"
    published = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    if not is_qwen:
        published = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    path = folder / "model.safetensors"
    stored = load_file(path)
    if is_qwen:
        start = f"model.layers.{layers}."
        stored = {
            f"mtp.layers.0.{name.removeprefix(start)}" if name.startswith(start) else name: tensor
            for name, tensor in stored.items()
        }
    stored |= {f"{stem}.{name}.weight": part.clone() for name, part in zip(published, parts, strict=True)}
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, **{name: config[name][:layers] for name in _LISTS if config.get(name)}}
    config["mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))


def add_foreseeing_module(folder: Path) -> None:
    """Give a Llama without memory a module that always predicts what it says.

    Its sublayers add nothing, so a token's successor depends on the token alone, and the module reads the token.
    """
    path, config_path = folder / "model.safetensors", folder / "config.json"
    config = json.loads(config_path.read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    stored = load_file(path)
    for name, tensor in stored.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    stem = f"model.layers.{layers}"
    for name in [name for name in stored if name.startswith("model.layers.0.")]:
        stored[f"{stem}.{name.removeprefix('model.layers.0.')}"] = stored[name].clone()
    norm = stored["model.norm.weight"]
    stored |= {f"{stem}.enorm.weight": torch.ones_like(norm), f"{stem}.hnorm.weight": torch.ones_like(norm)}
    stored[f"{stem}.shared_head.norm.weight"] = norm.clone()
    stored[f"{stem}.eh_proj.weight"] = torch.eye(hidden, 2 * hidden, dtype=norm.dtype)
    save_file(stored, path, metadata={"format": "pt"})
    config_path.write_text(json.dumps(config))
