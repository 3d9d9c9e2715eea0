"""The fast profile: short answers, conservative sampling, no reasoning, a small variant. All of it is declared.

Owns what the profile changes of a request. What a caller asked for that is faster still stays; an answer whose form is
held to a grammar, or that may be a call, is not cut, because half of one is worth nothing.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.requests.text_request import TextRequest


class FastOptions(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int = 160
    temperature: float = 0.3  # at most
    top_p: float = 0.9  # at most
    think: bool = False  # whether a model that can reason first does, where the caller does not say
    variant: str = "fast"  # MODEL@fast, where there is one


def apply_fast_profile(
    asked: TextRequest, options: FastOptions | None = None, *, reasons: bool = False
) -> tuple[TextRequest, tuple[ShapingChange, ...]]:
    """`reasons`: whether the variant can reason first."""
    options = options or FastOptions()
    asked, shaped = cap_max_tokens(asked, options.max_tokens)
    sampling = asked.sampling
    for name, most in (("temperature", options.temperature), ("top_p", options.top_p)):
        value = getattr(sampling, name)
        if value > most:
            sampling = structs.replace(sampling, **{name: most})
            shaped = (*shaped, ShapingChange(name, value, most))
    if reasons and asked.think is None and not options.think:
        asked = asked.but(think=False)
        shaped = (*shaped, ShapingChange("reasoning", None, "off"))
    return asked.but(sampling=sampling), shaped


def has_fixed_format(asked: TextRequest) -> bool:
    """Whether half of its answer would be worth nothing."""
    return asked.grammar is not None or (bool(asked.tools) and asked.choosing != "none")


def cap_max_tokens(asked: TextRequest, most: int) -> tuple[TextRequest, tuple[ShapingChange, ...]]:
    """With at most so many tokens of an answer, unless it has a form to keep."""
    if has_fixed_format(asked) or (asked.max_tokens is not None and asked.max_tokens <= most):
        return asked, ()
    told = ShapingChange("max_tokens", asked.max_tokens, most)
    return asked.but(max_tokens=most, min_tokens=min(asked.min_tokens, most)), (told,)
