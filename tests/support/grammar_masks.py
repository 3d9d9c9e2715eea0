"""Reads the masks of grammars."""

from __future__ import annotations

import numpy as np

from headrace.engine.grammar.constraints import Mask


def allowed(mask: Mask) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]
