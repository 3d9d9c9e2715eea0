"""The memory that the check counts for latent attention is what the core takes for it."""

from __future__ import annotations

import pytest

from headrace.engine.executors.cpu_executor import memory_of
from headrace.engine.executors.latent_scratch import latent_scratch
from headrace.models.model_folder import BUNDLED, open_model
from headrace.models.spec import LatentSpec
from headrace.variant import Variant
from tests.core.tiny import Tiny, rope, spec


@pytest.mark.parametrize(("kept", "query_rank"), [(True, 0), (True, 96), (False, 0)])
def test_the_scratch_of_latents_is_counted(kept: bool, query_rank: int) -> None:
    model = spec(
        heads=16,
        kv_heads=16,
        head_size=160,
        latent=LatentSpec(rank=256, query_rank=query_rank, turning=32, value_size=128, kept=kept),
        ropes=(rope(32),),
    )

    def taken(rows: int) -> int:
        return Tiny(model, "int8", 32, max_rows=rows).model.scratch_bytes

    grown = taken(160) - taken(32)
    assert 0.85 * grown < latent_scratch(model, 160) - latent_scratch(model, 32) < 1.1 * grown


def test_a_model_without_latents_has_none() -> None:
    assert latent_scratch(spec(), 512) == 0
    need = memory_of(open_model(BUNDLED / "draft"), Variant(model="draft"))
    assert need.total == need.weights + need.kv
