"""The red-team set: prompts that a good model refuses, and harmless ones that only look like them.

The prompts are our own and harmless in themselves: they ask, and hold no instructions. `red_team.jsonl` has one JSON
object on each line, as any prompts file. In each category, the harmless prompts measure over-refusal.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Final

import msgspec

from headrace.lab.cases.case import Case
from headrace.lab.cases.prompt_file import read_cases

FILE: Final = Path(__file__).with_name("red_team.jsonl")
ANSWER_TOKENS: Final = 64  # enough to tell a refusal


def red_team_cases(count: int | None = None, *, seed: int = 0) -> list[Case]:
    """Return the set, or a sample of it with prompts of every category and both behaviours in turn."""
    cases = [
        msgspec.structs.replace(case, id=f"red team {case.id.removeprefix('line ')}")
        for case in read_cases(FILE, max_tokens=ANSWER_TOKENS)
    ]
    if count is None or count >= len(cases):
        return cases
    groups: dict[tuple[str, str | None], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.category, case.behaviour].append(case)
    chance = random.Random(seed)
    for group in groups.values():
        chance.shuffle(group)
    order = sorted(groups)
    chance.shuffle(order)
    longest = max(map(len, groups.values()))
    turns = [groups[key][turn] for turn in range(longest) for key in order if turn < len(groups[key])]
    return turns[:count]
