"""The section [recording]: what is recorded of the tenants that opted in, for replay and the gate."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.value_types import Count, Section, Share, Text

RedactionRule = Literal["keys", "emails", "cards"]


class RecordingConfig(Section, frozen=True):
    """Recordings of tenants with `record = true`, in storage.folder."""

    unnamed: bool = False  # record requests that belong to no tenant
    share: Share = 1.0  # of the requests of tenants that opted in, 0 to 1
    bytes: Annotated[int, Meta(ge=65_536)] = 1024**3  # 1 GiB, all recordings; the oldest are deleted
    days: Annotated[float, Meta(gt=0)] = 30.0  # days that a recording is kept
    record_bytes: Count = 1024 * 1024  # 1 MiB, one request with its answer; larger ones are dropped
    queue: Count = 1024  # records that wait to be written; further ones are dropped
    queue_bytes: Count = 64 * 1024 * 1024  # 64 MiB of text that waits to be written
    redact: tuple[RedactionRule, ...] = ("keys", "emails", "cards")  # secrets replaced before anything is written
    redact_patterns: tuple[Text, ...] = ()  # further regular expressions whose matches are replaced
    key_env: Text | None = None  # environment variable with the key that encrypts recordings; default: plain files
