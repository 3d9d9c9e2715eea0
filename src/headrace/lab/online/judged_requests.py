"""JudgedRequests: requests that a small variant answered and a better one double-checked, for `headrace tune cascade`.

They hold texts, so only those of tenants that opted into recordings are kept: redacted as recordings are, in memory,
and bounded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.answer_observer import FinishedAnswer
from headrace.gateway.ledger.prices import PriceBook, microseconds
from headrace.gateway.requests.text_request import Choice
from headrace.gateway.routing.confidence import Confidence
from headrace.lab.cases.prompt_file import cases_of_records
from headrace.lab.comparison.answer import Answer
from headrace.lab.online.answer_difference import AnswerText
from headrace.lab.recording.recorded_request import answer_of, record_of
from headrace.lab.recording.redaction import Redactor
from headrace.lab.tuning.judged_pair import JudgedPair, judged_pair, pair_lines

MOST_BYTES: Final = 64 * 1024 * 1024  # of the texts of a shadow's pairs


class CopiedAnswer(NamedTuple):
    choices: list[Choice]
    text: AnswerText  # with its times


class JudgedRequests:
    """Of one shadow. All of it belongs to one event loop."""

    def __init__(
        self,
        redactor: Redactor,
        *,
        most: int,
        better: str,
        prices: PriceBook,
        is_recorded: Callable[[str], bool],
        unnamed: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`better`: the variant that judges. `is_recorded`: whether a tenant exists and opts into recordings now.
        `unnamed`: keep requests without a tenant, too. Beyond `most` pairs or `most_bytes` of texts the oldest go."""
        self.kept: deque[tuple[str, JudgedPair]] = deque(maxlen=most)  # with the tenant
        self._redactor = redactor
        self._better = better
        self._most_bytes = most_bytes
        self._bytes = 0  # of the texts of what is kept
        self._prices = prices
        self._is_recorded = is_recorded
        self._unnamed = unnamed

    def wants(self, finished: FinishedAnswer) -> bool:
        tenant = finished.exchange.caller.tenant
        return (self._is_recorded(tenant) if tenant else self._unnamed) and len(finished.choices) == 1

    def add(self, finished: FinishedAnswer, small: CopiedAnswer, large: CopiedAnswer) -> None:
        """Judge and keep both answers to a request, unless nothing is known of the small one's confidence.

        Its tenant may have been deleted, or have left recordings, while the answers were made: then nothing is kept."""
        if not self.wants(finished) or len(small.choices) != 1 or len(large.choices) != 1:
            return
        exchange = finished.exchange
        arrived = time.time() - (time.monotonic() - exchange.arrival)
        try:
            [case] = cases_of_records([record_of(finished, arrived, self._redactor)])
        except ApiError:
            return  # it cannot be written as a request
        costs = self._costs(exchange.served.name, small, large)
        confidence = _confidence(small.choices[0])
        pair = judged_pair(case, self._answer(small), self._answer(large), confidence, costs)
        if pair is not None:
            self._keep(exchange.caller.tenant, pair)

    def _keep(self, tenant: str, pair: JudgedPair) -> None:
        size = _text_bytes(pair)
        if size > self._most_bytes:
            return
        while self.kept and (len(self.kept) == self.kept.maxlen or self._bytes + size > self._most_bytes):
            self._bytes -= _text_bytes(self.kept.popleft()[1])
        self.kept.append((tenant, pair))
        self._bytes += size

    def _answer(self, copied: CopiedAnswer) -> Answer:
        return answer_of(copied.choices[0], self._redactor, copied.text.first_s, copied.text.seconds)

    def _costs(self, served: str, small: CopiedAnswer, large: CopiedAnswer) -> tuple[float, float]:
        """Return the prices of both answers if both variants have one, else their seconds."""
        micros = [
            self._prices.of(variant).micros(
                answer.choices[0].usage.prompt_tokens, 0, answer.text.tokens, microseconds(answer.text.seconds)
            )
            for variant, answer in ((served, small), (self._better, large))
        ]
        if all(micros):
            return float(micros[0]), float(micros[1])
        return small.text.seconds, large.text.seconds

    def follow(self, changes: AccountChanges) -> None:
        """Forget the requests of deleted tenants."""
        if deleted := changes.deleted_tenants:
            kept = [(tenant, pair) for tenant, pair in self.kept if tenant not in deleted]
            self.kept.clear()
            self.kept.extend(kept)
            self._bytes = sum(_text_bytes(pair) for _, pair in kept)

    def lines(self) -> bytes:
        """Return the pairs as JSON lines, which `headrace tune cascade --pairs` reads."""
        return pair_lines(pair for _, pair in self.kept)


def _text_bytes(pair: JudgedPair) -> int:
    return len(pair.question.encode()) + len(pair.answer.encode())


def _confidence(choice: Choice) -> Confidence:
    found = Confidence()
    for token in choice.logprobs or ():
        if token.logprob is not None:
            found.add(token.logprob, [logprob for _, _, logprob in token.top])
    return found
