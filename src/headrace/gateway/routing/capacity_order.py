"""CapacityOrder: the steps of a chain, those first whose servers predict the shortest time to the first token.

A conversation has a home among the steps, the same in every gateway (rendezvous hashing), and stays there for its
cached prefix until another step would answer much sooner. Predictions are for a prompt of 256 tokens and up to a few
seconds old, so the request's own length and what was placed meanwhile are added to them. Knows nothing of health.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from headrace.config.routing_section import StepConfig
from headrace.gateway.serving.capacity import VariantCapacity

_PROMPT_TOKENS: Final = 256  # of the prompt that predictions are for


class PromptLength(NamedTuple):
    """Tokens to compute before the first one of the answer."""

    whole: int = _PROMPT_TOKENS
    fresh: int = _PROMPT_TOKENS  # at the conversation's home, which has cached what came before


_MEASURED: Final = PromptLength()


class CapacityOrder:
    """Its state is what was placed since the last prediction of each variant, which the configuration bounds."""

    def __init__(self, capacity: Callable[[str], VariantCapacity]) -> None:
        """`capacity`: of a variant, as far as it is known."""
        self._capacity = capacity
        self._placed: dict[str, tuple[float, int]] = {}  # tokens of prompts since the prediction of that time

    def sort(
        self,
        steps: Sequence[StepConfig],
        surface: str,
        conversation: bytes,
        home_s: float,
        length: PromptLength = _MEASURED,
    ) -> tuple[list[StepConfig], str]:
        """Return the steps, and why the first one is first; the steps as they are, and "", if nothing is known.

        `home_s`: how much sooner another must answer before a conversation leaves its home.
        """
        home = _home(steps, conversation)
        waits = {
            step.variant: self.predict(step.variant, surface, length.fresh if step is home else length.whole)
            for step in steps
        }
        known = sorted(
            (step for step in steps if waits[step.variant] is not None), key=lambda step: waits[step.variant] or 0.0
        )
        if not known:
            return list(steps), ""
        soonest = waits[known[0].variant] or 0.0
        wait = waits[home.variant]
        stays = wait is not None and wait <= soonest + home_s
        if stays:
            known = [home, *(step for step in known if step is not home)]
        first = waits[known[0].variant] or 0.0
        unknown = [step for step in steps if waits[step.variant] is None]
        why = f"{'home, ' if stays else ''}{first * 1e3:.0f} ms to the first token"
        return known + unknown, why

    def predict(self, variant: str, surface: str, tokens: int = _PROMPT_TOKENS) -> float | None:
        """Return the seconds to the first token of a new request with a prompt of so many tokens; None if they are
        unknown."""
        capacity = self._capacity(variant)
        if not capacity.ttft_s:
            return None
        seconds = capacity.ttft_s.get(surface, max(capacity.ttft_s.values()))
        if not capacity.prompt_tokens_per_s:
            return seconds
        at, placed = self._placed.get(variant, (capacity.at, 0))
        further = tokens - _PROMPT_TOKENS + (placed if at == capacity.at else 0)
        return max(0.0, seconds + further / capacity.prompt_tokens_per_s)

    def place(
        self, variant: str, steps: Sequence[StepConfig], conversation: bytes, length: PromptLength = _MEASURED
    ) -> None:
        """Count a request that goes to a variant, one of the steps."""
        now = self._capacity(variant).at
        at, placed = self._placed.get(variant, (now, 0))
        tokens = length.fresh if _home(steps, conversation).variant == variant else length.whole
        self._placed[variant] = (now, placed + tokens if at == now else tokens)


def _home(steps: Sequence[StepConfig], conversation: bytes) -> StepConfig:
    return max(steps, key=lambda step: _weight(conversation, step.variant))


def _weight(conversation: bytes, variant: str) -> bytes:
    return blake2b(conversation, digest_size=8, key=blake2b(variant.encode(), digest_size=32).digest()).digest()
