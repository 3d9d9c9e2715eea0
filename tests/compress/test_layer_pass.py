"""The pass in numpy against the core in f32, family by family."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.compress.layer_pass import LayerPass, Tokens, embed, final_norm, head_logits, head_weight, load_layer
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.models.model_folder import open_model
from tests.models.tiny_configs import CONTEXT
from tests.models.tiny_models import COMPRESSIBLE, Reference, prompt

LENGTHS = (300, 17, 1)  # past every window and trained context, a few tokens, and one


@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_logits_are_those_of_the_core(name: str, tiny: Callable[[str], Reference]) -> None:
    folder = open_model(tiny(name).folder)
    prompts = [prompt(length, seed=5) for length in LENGTHS]
    executor = CpuExecutor.load(folder, weights="f32", kv="f32", threads=2, context=CONTEXT)
    expected = logits(executor, prompts)
    executor.close()
    tokens = Tokens.join(prompts)
    hidden = embed(folder, tokens)
    for index in range(len(folder.spec.layers)):
        hidden = LayerPass(folder.spec, index, load_layer(folder, index)).forward(hidden, tokens.offsets)
    found = head_logits(folder.spec, hidden, final_norm(folder), head_weight(folder))
    for begin, end, core in zip(tokens.offsets, tokens.offsets[1:], expected, strict=False):
        assert np.abs(found[begin:end] - core).max() / np.abs(core).max() < 1e-4


def test_chunks_are_whole_sequences_with_their_own_offsets() -> None:
    tokens = Tokens.join([[1] * length for length in (5, 3, 4, 20, 1)])
    assert list(tokens.chunks(8)) == [
        (slice(0, 8), (0, 5, 8)),
        (slice(8, 12), (0, 4)),
        (slice(12, 32), (0, 20)),
        (slice(32, 33), (0, 1)),
    ]
    assert tokens.longest == 20
