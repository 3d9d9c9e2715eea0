"""Detects what kind of answer an English question asks for: a way, a reason, a person, a time, a yes or no.

Owns the openings of questions and the kind of each. Does not look at the subject of the question.
"""

from __future__ import annotations

import re
from typing import Final

# The first pattern that matches the beginning of a clause decides.
_KINDS: Final = tuple(
    (re.compile(pattern), kind)
    for kind, patterns in (
        (
            "how much",
            (
                r"how (?:much|expensive)(?! (?:time|memory|space|disk|data|bandwidth))",
                r"what (?:do|does|would|will) (?:\w+ ){1,6}(?:cost|pay)\b",
                r"what is the (?:\w+ )?(?:price|cost|fee|charge)\b",
            ),
        ),
        ("how much of it", (r"how much (?:memory|space|disk|data|bandwidth)",)),
        ("how many", (r"how many", r"what is the number of")),
        ("how long", (r"how long", r"how much time", r"what is the (?:length|duration)")),
        ("how often", (r"how often", r"how frequently", r"what is the (?:\w+ )?frequency")),
        ("how big", (r"how (?:big|large)",)),
        ("how fast", (r"how (?:fast|quick|quickly)",)),
        ("how far", (r"how (?:far|old|high|deep|heavy|tall|wide)",)),
        ("what", (r"how (?:do|does|did) (?:[\w ]{1,80}? )?(?:differ|compare)",)),
        (
            "how",
            (
                r"(?:what (?:are|is) )?(?:the |a )?(?:best |easiest |good |sound |right |proper )?"
                r"(?:process|procedure|steps?|command|way|approach|instructions?|guide)(?: \w+)? (?:to|for|of)\b",
                r"(?:the )?installation of",
                r"how",
            ),
        ),
        ("why", (r"why",)),
        ("who", (r"(?:by )?who(?:m|se)?\b", r"which (?:person|people)")),
        ("when", (r"when\b(?! \w+ (?:\w+ ){0,8}\w+,)",)),  # "When I cancel, ..." is a condition
        ("where", (r"where",)),
        (
            "definition",
            (
                r"what (?:is|are) (?:a|an|meant by|the meaning of|mean)\b",
                r"what (?:does|do) (?:\w+ ){1,4}mean\b",
                r"define\b|describe what|explain what|(?:give me a )?definition of",
            ),
        ),
        ("can", (r"can (?:i|you|we|one|anybody)\b", r"(?:may|could) i")),
        ("should", (r"(?:should|must|shall|ought) (?:i|we|you|one)\b",)),
        ("whether", (r"(?:is|are|was|were|do|does|did|has|have|had|will|can|would|could|should|must|may)\b",)),
        ("what", (r"what|which",)),
    )
    for pattern in patterns
)
_LEAD: Final = re.compile(
    r"^(?:(?:so|and|but|also|then|ok|okay|well|now|in|on|at|for|with|using|under|since|from|after|before)\b"
    r"[^,?.!]{0,60}, *)?(?:(?:explain|describe|show|tell|say|know)(?: me| us)? )?"
)
_DEFINING: Final = re.compile(
    r"^(?:explain|define|describe)\b(?! (?:how|why|when|where|who|the (?:difference|method)))"
)
_CLAUSES: Final = re.compile(r"(?<=[.?!;:,])\s+")
_SPACE: Final = re.compile(r"\s+")


def question_kind(lower: str) -> str:
    """Decide by the last clause with a question mark, else by the first that begins like a question; "" if none."""
    clauses = [_SPACE.sub(" ", each).strip() for each in _CLAUSES.split(lower)]
    asked = [each for each in clauses if each.endswith("?")]
    for clause in [*asked[::-1], *clauses]:
        if _DEFINING.match(clause):
            return "definition"
        lead = _LEAD.match(clause)
        rest = clause[lead.end() :] if lead is not None else clause
        for pattern, kind in _KINDS:
            if pattern.match(rest):
                return kind
    return ""
