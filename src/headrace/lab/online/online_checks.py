"""Checks of a finished answer that need no other answer: JSON where JSON was asked for, citations of given sources."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.requests.text_request import Choice
from headrace.gateway.serving.exchange import Exchange
from headrace.lab.comparison.citations import check_citations
from headrace.lab.comparison.json_diff import parse_json


def failed_check(choices: Sequence[Choice], exchange: Exchange) -> str | None:
    """Return the check that the answer fails: json or citations; empty if it passes, None if no check applies."""
    grammar = exchange.text_request.grammar
    wants_json = grammar is not None and grammar.kind in ("json_object", "json_schema")
    applies = False
    for choice in choices:
        if choice.calls:
            continue  # an answer that calls a tool has no text to check
        if wants_json:
            applies = True
            if not parse_json(choice.content)[0]:
                return "json"
        citations = check_citations(choice.content, exchange.sources)
        if citations is not None:
            applies = True
            if not citations.correct:
                return "citations"
    return "" if applies else None
