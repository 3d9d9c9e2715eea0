"""The section [drift]: what is watched of how the traffic changes from week to week. headrace.lab applies it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headrace.config.value_types import Seconds, Section, Share, Text


class DriftConfig(Section, frozen=True):
    share: Share = 0.0  # of requests to profile, 0 to 1; 0: nothing is watched
    encoder: Text | None = None  # served encoder that finds topics; default: no topics
    topics: Annotated[int, Meta(ge=2, le=64)] = 16  # topics, at most
    near: Share = 0.6  # cosine similarity from which a question belongs to a topic
    timeout_s: Seconds = 5.0  # seconds an embedding may take
