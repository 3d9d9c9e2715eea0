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
    text_request: TextRequest, profile: ProfileConfig | None = None, *, can_reason: bool = False
) -> tuple[TextRequest, tuple[ShapingChange, ...]]:
    """Apply a profile. `can_reason`: whether the variant can reason before it answers."""
    profile = profile or ProfileConfig()
    text_request, changes = cap_max_tokens(text_request, profile.max_tokens)
    sampling = text_request.sampling
    for name, most in (("temperature", profile.temperature), ("top_p", profile.top_p)):
        value = getattr(sampling, name)
        if value > most:
            sampling = structs.replace(sampling, **{name: most})
            changes = (*changes, ShapingChange(name, value, most))
    if can_reason and text_request.think is None and not profile.think:
        text_request = text_request.but(think=False)
        changes = (*changes, ShapingChange("reasoning", None, "off"))
    return text_request.but(sampling=sampling), changes


def has_fixed_format(text_request: TextRequest) -> bool:
    """True if the answer follows a grammar or may be a tool call, so that half of it would be worthless."""
    return text_request.grammar is not None or (bool(text_request.tools) and text_request.choosing != "none")


def cap_max_tokens(text_request: TextRequest, most: int) -> tuple[TextRequest, tuple[ShapingChange, ...]]:
    """Cap the answer at `most` tokens, unless it has a fixed format."""
    if has_fixed_format(text_request) or (text_request.max_tokens is not None and text_request.max_tokens <= most):
        return text_request, ()
    change = ShapingChange("max_tokens", text_request.max_tokens, most)
    return text_request.but(max_tokens=most, min_tokens=min(text_request.min_tokens, most)), (change,)
