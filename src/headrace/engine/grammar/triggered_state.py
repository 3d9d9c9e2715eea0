"""A grammar that begins in the middle of free text, such as a tool call: one sequence's position in it.

Free text costs no masks. Tokens that would complete the marker and continue it against the grammar are masked out, so
the grammar holds from the marker on, however the text is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.engine.grammar.grammar_state import CompiledGrammar, GrammarError, GrammarState, Mask, MaskRun
from headrace.engine.grammar.token_vocabulary import TokenVocabulary
from headrace.engine.grammar.trigger_scanner import ScanPosition, TriggerScanner
from headrace.engine.interface.grammar_spec import GrammarTrigger


class TriggeredGrammar:
    """A compiled grammar and its trigger, shared by all sequences."""

    def __init__(
        self,
        grammar: CompiledGrammar | None,
        trigger: GrammarTrigger,
        vocabulary: TokenVocabulary | None,
        *,
        mask_words: int,
        best_effort: bool,
    ) -> None:
        """Without a grammar, the text stays free."""
        self.grammar = grammar
        self.repeats = trigger.repeats
        self.best_effort = best_effort
        self._vocabulary = vocabulary
        self._scanner = TriggerScanner(trigger)
        self.beginning = self._scanner.beginning
        self._masks: dict[ScanPosition, Mask] = {}
        if grammar is not None and vocabulary is not None:
            for position in self._scanner.tails():
                mask = self._mask(grammar, vocabulary, position, mask_words)
                if mask is not None:
                    self._masks[position] = mask

    def state(self) -> GrammarState:
        return TriggeredState(self)

    def mask(self, position: ScanPosition) -> Mask | None:
        """Return the tokens that may follow; None for all."""
        return self._masks.get(position)

    def step(self, position: ScanPosition, token: int) -> tuple[ScanPosition, list[int]]:
        """Return the position after a token. If the grammar begins, return the tokens that it has already."""
        if position.phase == "over" or self.grammar is None or self._vocabulary is None:
            return position, []
        position, begun = self._scanner.push(position, self._vocabulary.tokens[token])
        if begun is None:
            return position, []
        tokens = self._tokens(self._vocabulary, token, begun)
        # Does not fit only in output that another engine made, or if nothing else could be sampled.
        return position, tokens if self._fits(self.grammar, tokens) else []

    def _mask(
        self, grammar: CompiledGrammar, vocabulary: TokenVocabulary, position: ScanPosition, words: int
    ) -> Mask | None:
        """Return a mask without the tokens that complete a marker in a way that the grammar does not allow."""
        wrong: list[int] = []
        for token in vocabulary.completing(position.tail, self._scanner.markers):
            _, begun = self._scanner.push(position, vocabulary.tokens[token])
            if begun is not None and not self._fits(grammar, self._tokens(vocabulary, token, begun)):
                wrong.append(token)
        if not wrong:
            return None
        mask = np.full(words, 0xFFFFFFFF, dtype=np.uint32)
        for token in wrong:
            mask[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        return mask

    @staticmethod
    def _tokens(vocabulary: TokenVocabulary, token: int, begun: bytes) -> list[int]:
        if vocabulary.is_special(token) and begun == vocabulary.tokens[token]:
            return [token]
        return vocabulary.spell(begun)

    @staticmethod
    def _fits(grammar: CompiledGrammar, tokens: list[int]) -> bool:
        return bool(tokens) and grammar.matcher.deep_copy().validate_tokens(tokens) == len(tokens)


class TriggeredState(GrammarState):
    """Free while `active` is False. Then it is the state of the grammar, until that ends."""

    def __init__(self, triggered: TriggeredGrammar) -> None:
        self._triggered = triggered
        self._position = triggered.beginning
        self.active = False
        self.tokens: list[int] = []
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        return self.active and super().finished

    @property
    def accepting(self) -> bool:
        return not self.active or super().accepting

    def advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if self.finished:
                return count
            if self.active:
                try:
                    super().advance([token])
                except GrammarError:
                    if not self._triggered.best_effort:
                        raise
                    self._give_up()
                self._settle()
            else:
                self._position, begun = self._triggered.step(self._position, token)
                if begun:
                    self._begin(begun)
        return len(tokens)

    def forced(self, most: int) -> list[int]:
        if not self.active:
            return []
        known = len(self.tokens)
        try:
            found = super().forced(most)
        except GrammarError:
            if not self._triggered.best_effort:
                raise
            found = self.tokens[known:]
            self._give_up()
        self._settle()
        return found

    def fitting(self, drafts: Sequence[int]) -> int:
        if self.active and not self._triggered.repeats:
            return super().fitting(drafts)
        walker = self.clone()
        for count, token in enumerate(drafts):
            if not walker._takes(token):
                return count
            walker.advance([token])
        return len(drafts)

    def _takes(self, token: int) -> bool:
        if self.active:
            return super().fitting([token]) == 1
        mask = self._triggered.mask(self._position)
        return mask is None or bool(mask[token >> 5] >> (token & 31) & 1)

    def constrains(self, drafts: Sequence[int]) -> bool:
        if self.active:
            return True
        if drafts:
            runs = self.mask_runs(drafts)
            return any(not isinstance(run, list) or any(mask is not None for mask in run) for run in runs)
        return self._triggered.mask(self._position) is not None

    def mask_runs(self, drafts: Sequence[int]) -> list[MaskRun]:
        runs: list[MaskRun] = []
        state = self
        while True:
            follower = state.clone() if drafts else None
            count = 0 if follower is None else follower._switching(drafts)
            switches = follower is not None and follower.active != state.active
            if state.active:
                # The row after the grammar's end belongs to the free text.
                runs.append((state, drafts[: count - 1] if switches else drafts))
            else:
                runs.append(state._free_masks(drafts[: count - 1] if switches else drafts))
            if follower is None or not switches:
                return runs
            state, drafts = follower, drafts[count:]

    def _switching(self, drafts: Sequence[int]) -> int:
        """Advance until the grammar begins or ends. Return how many drafts that took: all of them without either."""
        active = self.active
        if active and not self._triggered.repeats:
            return len(drafts)
        for count, token in enumerate(drafts, 1):
            if active and not self._takes(token):
                return len(drafts)
            self.advance([token])
            if self.active != active:
                return count
        return len(drafts)

    def _free_masks(self, drafts: Sequence[int]) -> list[Mask | None]:
        position = self._position
        masks = [self._triggered.mask(position)]
        for token in drafts:
            position, _ = self._triggered.step(position, token)
            masks.append(self._triggered.mask(position))
        return masks

    def fail(self) -> None:
        if self._triggered.best_effort:
            self._give_up()
        else:
            super().fail()

    def clone(self) -> TriggeredState:
        copy = TriggeredState(self._triggered)
        copy._position = self._position
        copy.active = self.active
        copy.tokens = list(self.tokens)
        copy.error = self.error
        if self.active:
            copy._compiled = self._compiled
            copy._origin = self._origin
            copy.matcher = self.matcher.deep_copy()
        return copy

    def _begin(self, tokens: list[int]) -> None:
        assert self._triggered.grammar is not None
        super().__init__(self._triggered.grammar)
        self.active = True
        super().advance(tokens)
        self._settle()

    def _settle(self) -> None:
        """Free the text again after the grammar's end, if the trigger repeats."""
        if self._triggered.repeats and self.finished:
            self._release(ScanPosition("search"))

    def _give_up(self) -> None:
        """The grammar exceeded its bounds: the rest is free."""
        self._release(ScanPosition("over"))

    def _release(self, position: ScanPosition) -> None:
        self.active = False
        self.error = None
        self.tokens = []
        self._position = position
        del self.matcher
