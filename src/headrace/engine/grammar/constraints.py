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
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from headrace.engine.grammar.compilation import Compilation, CompilationJob, Compiled
from headrace.engine.grammar.grammar_state import CompiledGrammar, GrammarError, GrammarState, Mask, failure_reason
from headrace.engine.grammar.token_vocabulary import TokenVocabulary
from headrace.engine.grammar.triggered_state import TriggeredGrammar
from headrace.engine.interface.grammar_spec import Grammar, GrammarLimits, grammar_source, schema_rule_source
from headrace.errors import ModelError, RequestError
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

_COMPILERS: Final = 2  # threads


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Use it from one thread; slow work runs in its own threads."""

    def __init__(self, tokenizer: Tokenizer, limits: GrammarLimits | None = None, *, threads: int = 1) -> None:
        """`threads` compute masks. One thread leaves the cores to the step that runs at the same time."""
        self.limits = GrammarLimits() if limits is None else limits
        self.tokenizer = tokenizer
        self._words = -(-tokenizer.vocab_size // 32)
        self._lock = threading.Lock()
        self._vocabulary: tuple[TokenVocabulary, LLTokenizer] | None = None
        self._known: OrderedDict[tuple[str, Grammar], CompilationJob] = OrderedDict()
        self._known_bytes = 0
        self._unfinished: list[CompilationJob] = []
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
            grammar_source(grammar, limits)
            self._unfinished = [job for job in self._unfinished if not job.future.done()]
            if len(self._unfinished) >= limits.compiling:
                raise RequestError(
                    f"{limits.compiling} grammars are being compiled already. Try again.", parameter="grammar"
                )
            known = self._known[key] = CompilationJob(self._compilers, partial(self._compile, grammar))
            self._unfinished.append(known)
            self._known_bytes += grammar.size
            while len(self._known) > 1 and (len(self._known) > limits.kept or self._known_bytes > limits.kept_bytes):
                (_, forgotten), _ = self._known.popitem(last=False)
                self._known_bytes -= forgotten.size
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
        """Return the mask after a state and its drafts at once. None: everything is allowed, or the grammar rejects the
        drafts."""
        last = state.mask_runs(drafts)[-1]
        if isinstance(last, list):
            return last[-1]
        state, drafts = last
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

    def _read_vocabulary(self) -> tuple[TokenVocabulary, LLTokenizer]:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self.tokenizer.load_encoder()  # a worker's first grammar may find that the model's folder is gone
                except ModelError as error:
                    raise RequestError(f"Grammars are not available: {error}", parameter="grammar") from None
                vocabulary = TokenVocabulary(self.tokenizer)
                self._vocabulary = vocabulary, vocabulary.for_llguidance()
            return self._vocabulary

    def _compile(self, grammar: Grammar) -> Compiled:
        compiled: CompiledGrammar | None = None
        vocabulary: TokenVocabulary | None = None
        try:
            vocabulary, _ = self._read_vocabulary()
            source = self._usable_source(grammar)
            compiled = CompiledGrammar(lambda: self._matcher(source))
        except RequestError:
            if not grammar.best_effort:
                raise
        if grammar.trigger is None:
            assert compiled is not None
            return compiled
        return TriggeredGrammar(
            compiled, grammar.trigger, vocabulary, mask_words=self._words, best_effort=grammar.best_effort
        )

    def _usable_source(self, grammar: Grammar) -> str:
        """Return the grammar's source with as few schemas replaced as possible. It may still fail to compile."""
        source = grammar_source(grammar, self.limits)
        replaceable = {each.rule for each in grammar.schemas if each.instead is not None}
        if not replaceable or self._compiles(source):
            return source
        bad = {each.rule for each in grammar.schemas if not self._compiles(schema_rule_source(each))} & replaceable
        source = grammar_source(grammar, self.limits, replaced=bad)
        if bad == replaceable or (bad and self._compiles(source)):
            return source
        return grammar_source(grammar, self.limits, replaced=replaceable)

    def _compiles(self, source: str) -> bool:
        try:
            self._matcher(source)
        except RequestError:
            return False
        return True

    def _matcher(self, source: str) -> LLMatcher:
        _, vocabulary = self._read_vocabulary()
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=self._parser_limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails here if the grammar allows nothing or is too complex
        if matcher.is_error():
            raise RequestError(f"The grammar cannot be used: {failure_reason(matcher)}", parameter="grammar")
        _check_beginning(matcher, vocabulary.eos_tokens)
        return matcher

    def _fill(self, work: Sequence[tuple[GrammarState, Sequence[int]]]) -> list[list[Mask | None]]:
        """Return each state's masks, as far as its grammar accepts the drafts; none if it failed."""
        runs = [state.mask_runs(drafts) for state, drafts in work]
        computed = iter(self._follow([run for each in runs for run in each if not isinstance(run, list)]))
        found: list[list[Mask | None]] = []
        for each in runs:
            mine: list[Mask | None] = []
            for run in each:
                masks = run if isinstance(run, list) else next(computed)
                mine += masks
                if not isinstance(run, list) and len(masks) <= len(run[1]):
                    break  # the grammar goes no further: nor do the runs after it
            found.append(mine)
        return found

    def _follow(self, work: Sequence[tuple[GrammarState, Sequence[int]]]) -> list[list[Mask | None]]:
        """Return the masks of states that are inside their grammars."""
        masks = self._compute(work) if work else []
        for place, (state, _) in enumerate(work):
            if state.matcher.is_error() and state.error is None:
                # Drafts or other sequences may be to blame, and must not be noticeable: try once more without them.
                state.rebuild()
                masks[place] = self._compute([(state, ())])[0]
                if state.matcher.is_error():
                    state.fail()
                    masks[place] = [None] if state.error is None else []
            if state.error is not None:
                masks[place] = []
        return masks

    def _compute(self, work: Sequence[tuple[GrammarState, Sequence[int]]]) -> list[list[Mask | None]]:
        rows = sum(1 + len(drafts) for _, drafts in work)
        words = -(-self._read_vocabulary()[1].vocab_size // 32)
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
        found: list[list[Mask | None]] = []
        for start, (_, drafts) in zip(starts, work, strict=True):
            mine: list[Mask | None] = []
            for row in range(start, start + 1 + len(drafts)):
                if not filled[row]:
                    break
                mine.append(masks[row, : self._words])
            found.append(mine)
        return found


class Masks:
    """A step's masks, being computed."""

    def __init__(self, future: Future[list[list[Mask | None]]]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def collect(self) -> list[list[Mask | None]]:
        """Return, for each state, a mask for its next token and for the one after each draft, as far as its grammar
        goes; None where everything is allowed.

        Rows beyond that must not be sampled. No mask at all means that the state failed; its `error` says why.
        """
        return self._future.result()


def _check_beginning(compiled: LLMatcher, ends: Sequence[int]) -> None:
    """Raise RequestError if the first token already exceeds the bounds or cannot be undone, which drafts and restarts
    need."""
    trial = compiled.deep_copy()
    bits = np.unpackbits(np.frombuffer(trial.compute_bitmask(), dtype=np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits)[: 1 + len(ends)].tolist()
    token = next((token for token in tokens if token not in ends), tokens[0])
    if not trial.consume_token(token) or not trial.rollback(1):
        raise RequestError(f"The grammar cannot be used: {failure_reason(trial)}", parameter="grammar")


def _give_way() -> None:
    """Lower the thread's priority, so that a slow compilation does not take the processor from the steps."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 10))
