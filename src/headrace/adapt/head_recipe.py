"""How draft heads are trained: HeadRecipe. Checks values. Does not import torch, so that mistakes are found at once."""

from __future__ import annotations

import msgspec

from headrace.errors import RequestError
from headrace.models.draft_heads import MOST_HEADS


class HeadRecipe(msgspec.Struct, frozen=True, kw_only=True):
    depth: int = 4  # drafts that are trained: Medusa heads, or tokens that an EAGLE layer drafts on its own drafts
    epochs: int = 10
    batch: int = 16  # answers of one step
    rate: float = 1e-3
    seed: int = 0

    def check(self) -> None:
        """Raise RequestError for a value that cannot be used."""
        if not 1 <= self.depth <= MOST_HEADS:
            raise RequestError(f"'drafts' must be 1 to {MOST_HEADS}, not {self.depth}.", parameter="drafts")
        for name, value in (("epochs", self.epochs), ("batch", self.batch)):
            if value < 1:
                raise RequestError(f"'{name}' must be at least 1, not {value}.", parameter=name)
        if not 0.0 < self.rate <= 1.0:
            raise RequestError(f"'rate' must be above 0 and at most 1, not {self.rate:g}.", parameter="rate")
