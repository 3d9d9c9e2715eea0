"""Settings of the semantic cache that the configuration does not offer, with their measured defaults."""

from __future__ import annotations

import msgspec

from headrace.gateway.caches.semantic.agreement import AgreementMethod
from headrace.gateway.vector_index import EXACT


class SemanticTuning(msgspec.Struct, frozen=True, kw_only=True):
    least: float = 0.2  # a candidate with a lower score is a miss
    agree_by: AgreementMethod = "embedding"  # how kept and fresh answers are compared
    agree_least: float = 0.9  # cosine of two answers that count as the same
    agree_wait_s: float = 1.0  # timeout of a comparison, which runs in the background
    longest: int = 1000  # characters of a question; encoders read little more
    answer_bytes: int = 64 * 1024  # 64 KiB: the longest answer that is stored
    tenants: int = 256  # kept in memory
    exact: int = EXACT  # entries of one group beyond which usearch takes over
    seed: int = 0
