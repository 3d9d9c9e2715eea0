"""Base type of configuration sections, and value types with their ranges. Imports nothing of Headrace."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(min_length=1)]
Secret = Annotated[str, Meta(min_length=1, extra={"secret": True})]  # never printed
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Milliseconds = Annotated[float, Meta(gt=0)]
Hours = Annotated[float, Meta(gt=0)]
Weight = Annotated[float, Meta(ge=0.001, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]
# Fields of headrace.variant.Variant. `extra` only makes this type distinct from other tables.
Options = Annotated[dict[str, Any], Meta(extra={"options": True})]


# A rule that a configuration breaks: the key's path, such as models.mini.replicas, and what is wrong with its value.
Finding = tuple[str, str]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file."""
