"""The pairs of questions beside this file: which must not share an answer, and which may."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DATA = Path(__file__).parent / "data"
Split = Literal["train", "test", "late", "last", "fresh"]


@dataclass(frozen=True, slots=True)
class Pair:
    one: str
    other: str
    shared: bool  # whether both may have the same answer
    pattern: str
    category: str
    split: str


def pairs(split: Split | None = None) -> list[Pair]:
    return [each for name in ("adversarial", "paraphrases") for each in _read(name) if split in (None, each.split)]


def _read(name: str) -> list[Pair]:
    patterns = tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))["pattern"]
    return [
        Pair(one, other, name == "paraphrases", each["name"], each.get("category", "paraphrase"), each["split"])
        for each in patterns
        for one, other in each["pairs"]
    ]
