"""One sequence's position in a compiled grammar: what may follow, what must follow, what was rejected.

`constraints.py` compiles grammars and computes masks; `triggered_state.py` has the grammars that begin in free text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from headrace.engine.interface.grammar_spec import NOT_FOLLOWED
from headrace.errors import HeadraceError

Mask = NDArray[np.uint32]

_MOST_FORCED: Final = 64  # tokens at a time; about 20 us each, 100 us in a long text
_RENEW_SECONDS: Final = 0.3  # of processor time: bound on a recompilation that a step waits for, which is rare


class GrammarError(HeadraceError):
    """A grammar that exceeded its bounds, or reached a dead end, while in use."""


class CompiledGrammar:
    """A grammar at its start, from which every sequence's state is copied.

    The copies share llguidance's lexer cache and its bound. So that one sequence does not hit the bound because of
    other sequences or of drafts, a state that failed restarts with a new compilation.
    """

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        self._make = make
        began = time.thread_time()
        self.matcher = make()
        self._seconds = time.thread_time() - began

    def renew(self, failed: LLMatcher) -> None:
        """Compile again, unless that happened since `failed` was copied, or takes too long for a step."""
        if self.matcher is failed and self._seconds < _RENEW_SECONDS:
            self.matcher = self._make()

    def state(self) -> GrammarState:
        return GrammarState(self)


class GrammarState:
    """One sequence's position in its grammar."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._origin = compiled.matcher
        self.matcher = self._origin.deep_copy()
        self.tokens: list[int] = []
        self.error: str | None = None  # why it cannot continue

    @property
    def finished(self) -> bool:
        """True if nothing may follow: the text is complete, or the tokens included its end."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def accepting(self) -> bool:
        """True if the text may end here."""
        return self.matcher.is_accepting()

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance over the tokens. Return how many were taken: none after the one that finished the grammar.

        Raise GrammarError for a token that the grammar does not allow or that exceeds its bounds.
        """
        for count, token in enumerate(tokens):
            if self.finished:
                return count
            self._consume(token)
            self.tokens.append(token)
        return len(tokens)

    def forced(self, most: int) -> list[int]:
        """Return the tokens that must come next, at most `most`, and advance over them.

        They are what sampling under the masks would choose. There may be more to come: a forced text can have any
        length, and this call stays short.
        """
        most = min(most, _MOST_FORCED)
        found: list[int] = []
        # Use only the first token: the mask would allow it, but later ones may be tokenised differently after it.
        while len(found) < most and not self.finished and (tokens := self.matcher.compute_ff_tokens()):
            self._consume(tokens[0])
            self.tokens.append(tokens[0])
            found.append(tokens[0])
        return found

    def fitting(self, drafts: Sequence[int]) -> int:
        """Return how many of the drafts the grammar accepts, without advancing."""
        if not drafts or self.finished:
            return 0
        return self.matcher.validate_tokens(list(drafts))

    def constrains(self, drafts: Sequence[int]) -> bool:
        """True if a mask is needed for the next token or for one after the drafts."""
        return True

    def mask_runs(self, drafts: Sequence[int]) -> list[MaskRun]:
        """Return where the masks of the next token and of those after the drafts come from, in order."""
        return [(self, drafts)]

    def fail(self) -> None:
        """The matcher failed, also after it was rebuilt: end the sequence."""
        self.error = failure_reason(self.matcher)

    def clone(self) -> GrammarState:
        copy = GrammarState.__new__(GrammarState)
        copy._compiled = self._compiled
        copy._origin = self._origin
        copy.matcher = self.matcher.deep_copy()
        copy.tokens = list(self.tokens)
        copy.error = self.error
        return copy

    def rebuild(self) -> None:
        """Rebuild the state from its tokens alone, without traces of drafts or of other sequences."""
        self._compiled.renew(self._origin)
        self._origin = self._compiled.matcher
        self.matcher = self._origin.deep_copy()
        self.matcher.consume_tokens(self.tokens)

    def _consume(self, token: int) -> None:
        if not self.matcher.consume_token(token):
            if self.error is None:
                self.rebuild()  # drafts or other sequences may be to blame
                if self.matcher.consume_token(token):
                    return
                self.error = failure_reason(self.matcher)
            raise GrammarError(NOT_FOLLOWED + self.error)


def failure_reason(matcher: LLMatcher) -> str:
    """Return why a matcher failed, in one line or a few."""
    return re.split(r"\n<(?:state|non-verbose)", matcher.get_error())[0].strip()[:500] or "no reason given"


# Masks that are known, None where everything is allowed; or a state and drafts whose masks are to be computed.
MaskRun = list[Mask | None] | tuple[GrammarState, Sequence[int]]
