"""The decoder in torch against the pass in numpy, which is compared with the core family by family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.adapt.decoder import Decoder, check_trainable
from headrace.adapt.recipe import AdaptRecipe
from headrace.compress.layer_pass import LayerPass, Tokens, embed, final_norm, head_logits, head_weight, load_layer
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder, open_model
from headrace.models.packing import pack_matrix
from headrace.models.precision import parse_precision
from tests.models.tiny_models import Reference, prompt

TRAINABLE = ("llama", "qwen3", "gemma3", "phi3", "olmo2", "qwen3-moe")


def logits_of(folder: ModelFolder, tokens: list[int]) -> np.ndarray:
    joined = Tokens.join([tokens])
    hidden = embed(folder, joined)
    for index in range(len(folder.spec.layers)):
        hidden = LayerPass(folder.spec, index, load_layer(folder, index)).forward(hidden, joined.offsets)
    return head_logits(folder.spec, hidden, final_norm(folder), head_weight(folder))


def all_logits(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        states = decoder.hidden(torch.tensor([tokens]), torch.arange(len(tokens)))
        return decoder.logits(states).numpy()


@pytest.mark.parametrize("name", TRAINABLE)
def test_logits_are_those_of_the_pass_in_numpy(name: str, tiny: Callable[[str], Reference]) -> None:
    folder = open_model(tiny(name).folder)
    tokens = prompt(80, seed=3)
    expected = logits_of(folder, tokens)
    found = all_logits(Decoder(folder), tokens)
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-4


@pytest.mark.parametrize("name", ["glm4-moe", "qwen2-moe"])
def test_logits_of_mixtures_with_shared_experts_are_those_of_transformers(
    name: str, tiny: Callable[[str], Reference]
) -> None:
    tokens = prompt(40, seed=3)
    expected = tiny(name).logits(tokens)
    found = all_logits(Decoder(open_model(tiny(name).folder)), tokens)
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-4


def test_padding_does_not_change_the_states_of_a_row(tiny: Callable[[str], Reference]) -> None:
    decoder = Decoder(open_model(tiny("llama").folder))
    short, long = prompt(5, seed=1), prompt(12, seed=2)
    padded = torch.tensor([short + [0] * 7, long])
    with torch.no_grad():
        found = decoder.logits(decoder.hidden(padded, torch.arange(5))).numpy()
    np.testing.assert_allclose(found, all_logits(decoder, short), rtol=0, atol=1e-5)


def test_a_new_adapter_changes_nothing(tiny: Callable[[str], Reference]) -> None:
    folder = open_model(tiny("llama").folder)
    tokens = prompt(20)
    adapted = Decoder(folder, AdaptRecipe(rank=4))
    assert np.array_equal(all_logits(adapted, tokens), all_logits(Decoder(folder), tokens))
    assert {name.rsplit(".", 1)[1] for name in adapted.trained} == {"lora_A", "lora_B"}
    assert adapted.trained["model.layers.0.self_attn.k_proj.lora_B"].shape == (folder.spec.kv_size, 4)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_quantised_base_has_the_weights_that_the_engine_serves(
    precision: str, tiny: Callable[[str], Reference]
) -> None:
    folder = open_model(tiny("llama").folder)
    decoder = Decoder(folder, AdaptRecipe(rank=4, base="int4" if precision == "int4" else "int8"))
    name = "layers.1.mlp.down"
    dense = folder.tensor(name).to_f32()
    served = pack_matrix(dense, parse_precision(precision), decoder._pool).unpack()
    assert np.array_equal(decoder.weight(name).numpy(), served)
    assert not np.array_equal(served, dense)
    # A gradient passes through the packed weights to the adapter.
    decoder.logits(decoder.hidden(torch.tensor([prompt(9)]), torch.arange(9))).sum().backward()
    for module in ("layers.0.self_attn.v_proj", "layers.2.mlp.down_proj"):
        gradient = decoder.trained[f"model.{module}.lora_B"].grad
        assert gradient is not None
        assert float(gradient.abs().max()) > 0


def test_weights_that_are_trained_for_a_precision_are_rounded_as_the_engine_rounds(
    tiny: Callable[[str], Reference],
) -> None:
    folder = open_model(tiny("llama").folder)
    decoder = Decoder(folder, AdaptRecipe(full=True, rounded="int4"))
    tokens = prompt(15)
    frozen = Decoder(folder, AdaptRecipe(rank=2, base="int4"))
    np.testing.assert_allclose(all_logits(decoder, tokens), all_logits(frozen, tokens), rtol=0, atol=1e-4)
    decoder.logits(decoder.hidden(torch.tensor([tokens]), torch.arange(15))).sum().backward()
    gradient = decoder.trained["layers.0.attn.qkv"].grad
    assert gradient is not None
    assert float(gradient.abs().max()) > 0


def test_encoders_are_rejected(tiny: Callable[[str], Reference]) -> None:
    with pytest.raises(RequestError, match="is no decoder"):
        check_trainable(open_model(tiny("bert").folder).spec)


@pytest.mark.parametrize("name", ["gemma3n", "gemma3n-untied", "ministral3", "deepseek-v3", "gpt-oss"])
def test_decoders_that_it_would_compute_otherwise_are_rejected_by_name(
    name: str, tiny: Callable[[str], Reference]
) -> None:
    spec = open_model(tiny(name).folder).spec
    with pytest.raises(RequestError, match=f"cannot train {spec.architecture} yet"):
        check_trainable(spec)


@pytest.mark.parametrize("change", [{"shares": 0}, {"gate_cutoff": 1.0}, {"grows": True}])
def test_a_layer_that_it_would_compute_otherwise_is_enough(
    change: dict[str, Any], tiny: Callable[[str], Reference]
) -> None:
    spec = open_model(tiny("llama").folder).spec
    check_trainable(spec)
    last = replace(spec.layers[-1], **change)
    with pytest.raises(RequestError, match="cannot train"):
        check_trainable(replace(spec, layers=(*spec.layers[:-1], last)))
