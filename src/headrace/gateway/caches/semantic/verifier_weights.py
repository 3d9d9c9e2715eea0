"""The verifier's weights. Written by `python benchmarks/semantic_cache.py fit`; not to be edited by hand."""

from __future__ import annotations

from typing import Final

BIAS: Final = -5.1903
WEIGHTS: Final = {
    "cosine": 2.8356,
    "cosine_top": 2.5722,
    "overlap": 0.0000,
    "containment": 2.0109,
    "unmatched": 0.0000,
    "both_unmatched": 0.0000,
    "length": 0.0000,
    "order": 0.0000,
    "same_kind": 0.0000,
    "other_kind": 0.0000,
    "exact_parts": 0.0000,
    "loose_opposites": -3.5343,
    "changed": -0.6593,
}
