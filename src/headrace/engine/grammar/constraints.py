"""Constrained decoding: which tokens a sequence may generate next, as one bit per token.

GrammarCompiler compiles grammars for one tokenizer and computes a step's masks, both in threads. GrammarState is one
sequence's position in its grammar. llguidance parses; `interface/grammar_spec.py` describes grammars. Does not know
logits or requests.

What may follow depends only on the tokens so far, not on rejected drafts or on which tokens were forced. If a grammar
leaves one continuation, its tokens are those that the tokenizer would produce.

    grammars.prepare(grammar) -> Compilation -> GrammarState        once, before anything is queued
    grammars.launch([(state, drafts), ...]) -> Masks -> collect()   while the step runs
    state.advance(tokens); state.forced()                           after it
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from headrace.engine.grammar.token_vocabulary import Vocabulary
from headrace.engine.interface.grammar_spec import Grammar, GrammarLimits, grammar_source
from headrace.errors import HeadraceError, ModelError, RequestError
from headrace.models.text.tokenizer import Tokenizer

__all__ = [
    "Compilation",
    "Grammar",
    "GrammarCompiler",
    "GrammarError",
    "GrammarLimits",
    "GrammarState",
    "Mask",
    "Masks",
]

Mask = NDArray[np.uint32]

_COMPILERS: Final = 2  # threads
_MOST_FORCED: Final = 64  # tokens at a time; about 20 us each, 100 us in a long text
_RENEW_SECONDS: Final = 0.3  # bound on a recompilation that a step waits for, which is rare


class GrammarError(HeadraceError):
    """A grammar that exceeded its bounds, or reached a dead end, while in use."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Use it from one thread; slow work runs in its own threads."""

    def __init__(self, tokenizer: Tokenizer, limits: GrammarLimits | None = None, *, threads: int = 1) -> None:
        """`threads` compute masks. One thread leaves the cores to the step that runs at the same time."""
        self.limits = GrammarLimits() if limits is None else limits
        self.tokenizer = tokenizer
        self._words = -(-tokenizer.vocab_size // 32)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._known: OrderedDict[tuple[str, Grammar], Future[CompiledGrammar]] = OrderedDict()
        self._known_bytes = 0
        self._unfinished: list[Future[CompiledGrammar]] = []
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="headrace-grammar", initializer=_give_way)
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="headrace-mask")
        self._executor = LLExecutor(threads)

    def prepare(self, grammar: Grammar, *, salt: str = "") -> Compilation:
        """Start compiling. Raise RequestError at once for errors that need no compiling.

        Compiled grammars are cached per salt, so that the compile time reveals nothing about other tenants' requests.
        """
        limits = self.limits
        key = (salt, grammar)
        known = self._known.get(key)
        if known is None:
            source = grammar_source(grammar, limits)
            self._unfinished = [future for future in self._unfinished if not future.done()]
            if len(self._unfinished) >= limits.compiling:
                raise RequestError(
                    f"{limits.compiling} grammars are being compiled already. Try again.", parameter="grammar"
                )
            known = self._known[key] = self._compilers.submit(lambda: CompiledGrammar(lambda: self._compile(source)))
            self._unfinished.append(known)
            self._known_bytes += len(grammar.text)
            while len(self._known) > 1 and (len(self._known) > limits.kept or self._known_bytes > limits.kept_bytes):
                (_, forgotten), _ = self._known.popitem(last=False)
                self._known_bytes -= len(forgotten.text)
        else:
            self._known.move_to_end(key)
        return Compilation(known, limits.compile_seconds)

    def compile(self, grammar: Grammar, *, salt: str = "") -> GrammarState:
        """Compile and wait. Raise RequestError if the grammar is wrong or takes too long."""
        return self.prepare(grammar, salt=salt).result()

    def launch(self, work: Sequence[tuple[GrammarState, Sequence[int]]]) -> Masks:
        """Start computing the masks of each state and of what follows its drafts. Do not touch the states until the
        masks are collected."""
        return Masks(self._filler.submit(self._fill, work))

    def mask_after(self, state: GrammarState, drafts: Sequence[int]) -> Mask | None:
        """Return the mask after a state and its drafts at once; None if the grammar rejects the drafts."""
        matcher = state.matcher
        taken = matcher.try_consume_tokens(list(drafts)) if drafts else 0
        mask: Mask | None = None
        if taken == len(drafts) and not matcher.is_stopped():
            ((mask, *_),) = self._compute([(state, ())])
        if taken:
            matcher.rollback(taken)
        if matcher.is_error():
            state.rebuild()
            return None
        return mask

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._filler.shutdown()

    @cached_property
    def _parser_limits(self) -> LLParserLimits:
        limits = self.limits
        return LLParserLimits(
            max_items_in_row=limits.row_items,
            initial_lexer_fuel=limits.compile_fuel,
            step_lexer_fuel=limits.step_fuel,
            step_max_items=limits.step_items,
            max_lexer_states=limits.lexer_states,
            max_grammar_size=limits.symbols,
            verbose_errors=False,
        )

    def _read_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self.tokenizer.load_encoder()  # a worker's first grammar may find that the model's folder is gone
                except ModelError as error:
                    raise RequestError(f"Grammars are not available: {error}", parameter="grammar") from None
                self._vocabulary = Vocabulary(self.tokenizer).for_llguidance()
            return self._vocabulary

    def _compile(self, source: str) -> LLMatcher:
        vocabulary = self._read_vocabulary()
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=self._parser_limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails here if the grammar allows nothing or is too complex
        if matcher.is_error():
            raise RequestError(f"The grammar cannot be used: {_reason(matcher)}", parameter="grammar")
        _check_beginning(matcher, vocabulary.eos_tokens)
        return matcher

    def _fill(self, work: Sequence[tuple[GrammarState, Sequence[int]]]) -> list[list[Mask]]:
        """Return each state's masks, as far as its grammar accepts the drafts; none if it failed."""
        masks = self._compute(work)
        for place, (state, _) in enumerate(work):
            if state.matcher.is_error() and state.error is None:
                # Drafts or other sequences may be to blame, and must not be noticeable: try once more without them.
                state.rebuild()
                masks[place] = self._compute([(state, ())])[0]
                if state.matcher.is_error():
                    state.error = _reason(state.matcher)
            if state.error is not None:
                masks[place] = []
        return masks

    def _compute(self, work: Sequence[tuple[GrammarState, Sequence[int]]]) -> list[list[Mask]]:
        rows = sum(1 + len(drafts) for _, drafts in work)
        words = -(-self._read_vocabulary().vocab_size // 32)
        # A mask that is not computed stays empty, which no real mask is.
        masks = np.zeros((rows, words), dtype=np.uint32)
        alone: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        starts: list[int] = []
        start = 0
        for state, drafts in work:
            starts.append(start)
            if drafts:
                drafted.append((state.matcher, start, list(drafts)))
            else:
                alone.append((state.matcher, start))
            start += 1 + len(drafts)
        place = masks.ctypes.data
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, place, words * 4, rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, place, words * 4, rows)
        filled = np.any(masks, axis=1)
        found: list[list[Mask]] = []
        for start, (_, drafts) in zip(starts, work, strict=True):
            mine: list[Mask] = []
            for row in range(start, start + 1 + len(drafts)):
                if not filled[row]:
                    break
                mine.append(masks[row, : self._words])
            found.append(mine)
        return found


class Compilation:
    """A grammar being compiled."""

    def __init__(self, future: Future[CompiledGrammar], seconds: float) -> None:
        self._future = future
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._future.done() or time.monotonic() >= self._until

    def result(self) -> GrammarState:
        """Wait for the compilation. Raise RequestError if the grammar is wrong or takes too long."""
        try:
            compiled = self._future.result(max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            raise RequestError(
                f"The grammar takes longer than {self._seconds:g} s to compile.", parameter="grammar"
            ) from None
        return GrammarState(compiled)


class CompiledGrammar:
    """A grammar at its start, from which every sequence's state is copied.

    The copies share llguidance's lexer cache and its bound. So that one sequence does not hit the bound because of
    other sequences or of drafts, a state that failed restarts with a new compilation.
    """

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        self._make = make
        began = time.monotonic()
        self.matcher = make()
        self._seconds = time.monotonic() - began

    def renew(self, failed: LLMatcher) -> None:
        """Compile again, unless that happened since `failed` was copied, or takes too long for a step."""
        if self.matcher is failed and self._seconds < _RENEW_SECONDS:
            self.matcher = self._make()


class Masks:
    """A step's masks, being computed."""

    def __init__(self, future: Future[list[list[Mask]]]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def collect(self) -> list[list[Mask]]:
        """Return, for each state, a mask for its next token and for the one after each draft, as far as its grammar
        goes.

        Rows beyond that must not be sampled. No mask at all means that the state failed; its `error` says why.
        """
        return self._future.result()


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
        """Whether nothing may follow: the text is complete, or the tokens included its end."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
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

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        if count and not self.matcher.rollback(count):
            raise GrammarError(f"The grammar cannot be rolled back: {_reason(self.matcher)}")
        if count:
            del self.tokens[-count:]

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
                self.error = _reason(self.matcher)
            raise GrammarError(f"The grammar cannot be followed: {self.error}")


def _check_beginning(compiled: LLMatcher, ends: Sequence[int]) -> None:
    """Raise RequestError if the first token already exceeds the bounds or cannot be undone, which drafts and restarts
    need."""
    trial = compiled.deep_copy()
    bits = np.unpackbits(np.frombuffer(trial.compute_bitmask(), dtype=np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits)[: 1 + len(ends)].tolist()
    token = next((token for token in tokens if token not in ends), tokens[0])
    if not trial.consume_token(token) or not trial.rollback(1):
        raise RequestError(f"The grammar cannot be used: {_reason(trial)}", parameter="grammar")


def _give_way() -> None:
    """Lower the thread's priority, so that a slow compilation does not take the processor from the steps."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().split("\n<state>")[0].strip()[:500] or "no reason given"
