"""How many requests of batches run at once."""

from __future__ import annotations

from headrace.config import Config, ModelConfig
from headrace.server.durable_state import batch_running


def test_a_variant_for_throughput_is_filled_twice() -> None:
    plain, wide = {"max_sequences": 200}, {"max_sequences": 40, "batch_mode": "throughput"}
    assert batch_running(Config(models={"a": ModelConfig(options=plain)})) == 32
    assert batch_running(Config(models={"a": ModelConfig(options=plain), "b": ModelConfig(options=wide)})) == 80
