"""Turns a sequence's tokens into text as they arrive: incremental detokenisation, stop strings, stop ids, min_tokens.

Also reports the text of each token, for log-probabilities. The text depends on the tokens alone, not on how many arrive
at once. It ends before the first complete stop string (the longest, if several end together). Text that may become a
stop string is held back. Does not know requests, sampling or transport.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from headrace.errors import RequestError
from headrace.models.text.detokenizer import Detokenizer, HasPieces

MOST_STOPS: Final = 64
MOST_STOP_CHARACTERS: Final = 1024  # per stop string


class TokenText(NamedTuple):
    """The text of one output token. All of them joined are the text that was released."""

    place: int  # index of the token in the output
    token: int
    text: str  # empty if the token is only part of a character: the token that completes it has all of it
    start: int  # offset in the output, in characters


class OutputText:
    """The text of one sequence's output.

    `push` takes tokens and returns the text that they make certain. Once `ended` is set, the output ended at the last
    token that `count` counts, and later tokens are ignored. `finish` returns the text that was held back. Pushing the
    tokens of a lost output again gives the same text and the same state.
    """

    def __init__(
        self,
        tokenizer: HasPieces,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        continues: bool = True,
        pieces: bool = False,
    ) -> None:
        """The output cannot end before `min_tokens` tokens. `pieces` records token texts for `take_pieces`."""
        self._stops = stop_strings(tuple(stop))
        self._include = include_stop
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, continues=continues)
        self._state = 0
        self._held = ""  # held back: it may begin a stop string
        self._pieces: deque[TokenText] | None = deque() if pieces else None
        self._released: list[TokenText] = []
        self._characters = 0
        self.count = 0  # tokens of the output, the one that ended it included
        self.ended: str | int | None = None  # the stop string or stop id that ended it

    def push(self, tokens: Sequence[int]) -> str:
        text = ""
        for token in tokens:
            if self.ended is not None:
                break
            self.count += 1
            if token in self._stop_ids and self.count > self._min_tokens:
                self.ended = token
                if not self._include:
                    break
            text += self._feed(self._detokenizer.push(token), token)
        return text

    def finish(self) -> str:
        """Return the rest at the output's end. Bytes that never became a character become U+FFFD."""
        if isinstance(self.ended, str):
            return ""
        text = self._feed(self._detokenizer.finish(), None)
        if not isinstance(self.ended, str):
            text += self._held
            self._held = ""
            self._release(everything=True)
        return text

    def take_pieces(self) -> list[TokenText]:
        """Return the token texts released since the last call; for a cut token, the part that was released."""
        released = self._released
        self._released = []
        return released

    def _feed(self, added: str, token: int | None) -> str:
        if self._pieces is not None:
            self._note(added, token)
        if self._stops is None:
            if self._pieces is not None:
                self._release(everything=False)
            return added
        if not added:
            return ""
        text = self._held + added
        self._state, end, length = self._stops.scan(self._state, added, search=self.count > self._min_tokens)
        if length:
            end += len(self._held)
            shown = end if self._include else end - length
            self.ended = text[end - length : end]
            self._held = ""
            self._cut(len(text) - shown)
            return text[:shown]
        shown = len(text) - self._stops.depth[self._state]
        self._held = text[shown:]
        self._release(everything=False)
        return text[:shown]

    def _note(self, added: str, token: int | None) -> None:
        assert self._pieces is not None
        if token is not None:
            self._pieces.append(TokenText(self.count - 1, token, added, self._characters))
        elif added and self._pieces:
            # Bytes that never became a character belong to the last token.
            last = self._pieces.pop()
            self._pieces.append(last._replace(text=last.text + added))
        elif added and self._released:
            last = self._released.pop()
            self._released.append(last._replace(text=last.text + added))
        self._characters += len(added)

    def _release(self, *, everything: bool) -> None:
        """Release token texts whose text was returned. One without text waits for the character that it belongs to."""
        if not self._pieces:
            return
        certain = self._characters - len(self._held)
        waiting: list[TokenText] = []
        while self._pieces and (everything or self._pieces[0].start + len(self._pieces[0].text) <= certain):
            piece = self._pieces.popleft()
            waiting.append(piece)
            if piece.text or everything:
                self._released += waiting
                waiting.clear()
        self._pieces.extendleft(reversed(waiting))

    def _cut(self, dropped: int) -> None:
        """End the output `dropped` characters before the end of the detokenised text."""
        self._characters -= dropped
        if self._pieces is None:
            return
        for piece in self._pieces:
            if piece.start < self._characters:
                self._released.append(piece._replace(text=piece.text[: self._characters - piece.start]))
        self._pieces.clear()


def token_bytes(tokenizer: HasPieces, token: int) -> bytes:
    """Return a token's own bytes, whatever surrounds it; for a special token, its name."""
    pieces = tokenizer.pieces
    if pieces.kind.form == "window":
        return pieces.window([token]).encode()
    raw = pieces.raw(token)
    if isinstance(raw, bytes):
        return raw
    for old, new in pieces.kind.replaces:
        raw = raw.replace(old, new)
    return raw.encode()


class StopStrings:
    """Finds the first complete stop string, reading every character once (Aho-Corasick).

    A state is the longest prefix of any stop string that the text so far ends with; `depth` is its length.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self._found = [0]  # length of the longest string that ends in each state
        for string in strings:
            self._add(string)
        self._fail = self._links()
        # Most text contains no part of a stop string; a regular expression skips it fastest.
        self._first = re.compile("[" + "".join(re.escape(character) for character in self._next[0]) + "]")

    def scan(self, state: int, text: str, *, search: bool) -> tuple[int, int, int]:
        """Return the state after the text, where the first complete string ends in it, and its length (0 if none)."""
        follow, fail, found = self._next, self._fail, self._found
        place, end = 0, len(text)
        while place < end:
            if not state:
                first = self._first.search(text, place)
                if first is None:
                    return 0, 0, 0
                place = first.start()
            character = text[place]
            place += 1
            while (after := follow[state].get(character)) is None and state:
                state = fail[state]
            state = after or 0
            if found[state] and search:
                return state, place, found[state]
        return state, 0, 0

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            after = self._next[state].get(character)
            if after is None:
                after = self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self._found.append(0)
            state = after
        self._found[state] = len(string)

    def _links(self) -> list[int]:
        """Return, for each state, the next longest prefix of any string that the same text ends with."""
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, after in self._next[state].items():
                shorter = fail[state]
                while shorter and character not in self._next[shorter]:
                    shorter = fail[shorter]
                fail[after] = self._next[shorter].get(character, 0)
                self._found[after] = self._found[after] or self._found[fail[after]]
                queue.append(after)
        return fail


@lru_cache(maxsize=256)
def stop_strings(strings: tuple[str, ...]) -> StopStrings | None:
    """Return a matcher for the strings, or None. Raise RequestError if they exceed the bounds."""
    if len(strings) > MOST_STOPS:
        raise RequestError(f"'stop' takes at most {MOST_STOPS} strings, not {len(strings)}.", parameter="stop")
    for string in strings:
        if not 1 <= len(string) <= MOST_STOP_CHARACTERS:
            raise RequestError(
                f"A stop string must have 1 to {MOST_STOP_CHARACTERS} characters, not {len(string)}.", parameter="stop"
            )
    return StopStrings(strings) if strings else None
