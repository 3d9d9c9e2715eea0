"""The verifier's weights. Written by `python benchmarks/semantic_cache.py fit`; not to be edited by hand."""

from __future__ import annotations

from typing import Final

BIAS: Final = -8.3028
WEIGHTS: Final = {
    "cosine": 7.4077,
    "cosine_top": 2.2937,
    "overlap": -2.6617,
    "containment": -0.8580,
    "length": 2.3458,
    "order": 3.5897,
    "same_kind": -0.5227,
    "other_kind": -0.7102,
    "exact_parts": -0.1960,
    "loose_opposites": -4.1954,
    "changed": -6.0616,
    "frame": -4.3883,
    "equal_frame": 2.9157,
    "differs": 3.3701,
    "one_sided": 2.0891,
    "moved": 2.8819,
    "any_moved": 2.6837,
    "moved_only": -1.7960,
}
