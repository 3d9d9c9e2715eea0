"""Reads subjects.toml: the domains of the reading task, their subjects, and what can be said and asked of a subject.

Owns the shapes; the sentences are in the file.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attribute:
    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Domain:
    name: str
    subject: str  # a text with slots
    attributes: tuple[Attribute, ...]


READ = tomllib.loads((Path(__file__).parent / "subjects.toml").read_text(encoding="utf-8"))
CHOICES: dict[str, list[str]] = READ["choices"]  # a slot's name -> what it may be
DOMAINS = tuple(
    Domain(
        each["name"],
        each["subject"],
        tuple(Attribute(name, tuple(lines["say"]), tuple(lines["ask"])) for name, lines in each["attributes"].items()),
    )
    for each in READ["domain"]
)
