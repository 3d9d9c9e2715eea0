"""Applies the fast profile: short answers, conservative sampling, no reasoning.

Keeps what a request asks for if it is faster still. Does not shorten an answer with a fixed format, because half of one
is worthless.
"""

from __future__ import annotations

from msgspec import structs

from headrace.config.shaping_section import ProfileConfig
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.requests.text_request import TextRequest


def apply_fast_profile(
    asked: TextRequest, profile: ProfileConfig | None = None, *, can_reason: bool = False
) -> tuple[TextRequest, tuple[ShapingChange, ...]]:
    """Apply a profile. `can_reason`: whether the variant can reason before it answers."""
    profile = profile or ProfileConfig()
    asked, changes = cap_max_tokens(asked, profile.max_tokens)
    sampling = asked.sampling
    for name, most in (("temperature", profile.temperature), ("top_p", profile.top_p)):
        value = getattr(sampling, name)
        if value > most:
            sampling = structs.replace(sampling, **{name: most})
            changes = (*changes, ShapingChange(name, value, most))
    if can_reason and asked.think is None and not profile.think:
        asked = asked.but(think=False)
        changes = (*changes, ShapingChange("reasoning", None, "off"))
    return asked.but(sampling=sampling), changes


def has_fixed_format(asked: TextRequest) -> bool:
    """Whether the answer follows a grammar or may be a tool call, so that half of it would be worthless."""
    return asked.grammar is not None or (bool(asked.tools) and asked.choosing != "none")


def cap_max_tokens(asked: TextRequest, most: int) -> tuple[TextRequest, tuple[ShapingChange, ...]]:
    """Cap the answer at `most` tokens, unless it has a fixed format."""
    if has_fixed_format(asked) or (asked.max_tokens is not None and asked.max_tokens <= most):
        return asked, ()
    change = ShapingChange("max_tokens", asked.max_tokens, most)
    return asked.but(max_tokens=most, min_tokens=min(asked.min_tokens, most)), (change,)
