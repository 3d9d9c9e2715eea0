"""Biases by distance, against the buckets of MPNet in transformers."""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from headrace.models.distance_buckets import bucket_of, spread_buckets


def test_distances_have_the_buckets_of_transformers() -> None:
    distances = range(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(torch.tensor(distances)).tolist()
    assert [bucket_of(distance, 32, 128) for distance in distances] == expected


def test_a_table_is_spread_over_distances_up_to_the_last_bucket() -> None:
    table = np.arange(16, dtype=np.float32).reshape(8, 2)
    found = spread_buckets(table, 6)
    assert found.shape == (2, 13)
    # Keys before their query, nearest last; then the query itself; then keys after it.
    assert found[0].tolist() == [6, 6, 6, 4, 4, 2, 0, 10, 12, 12, 14, 14, 14]
    assert (found[1] == found[0] + 1).all()
