"""Whether a server's counts of output tokens are to be believed: the texts of some answers, counted again.

Owns the comparison, and the second look where an answer holds tokens that are in no text. Who counts is tokens's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from headrace.bench.client.http_client import HttpClient
from headrace.bench.client.timed_response import TimedResponse
from headrace.bench.load_generator.request_builder import BuiltRequest
from headrace.bench.load_generator.token_counters import TokenCounter
from headrace.bench.results.benchmark_result import TokenCheck

MOST_DIFFERENCE: Final = 0.05  # of the server's count of output tokens and ours
_LEAST_TOKENS: Final = 32  # of answers that say anything of how a server counts

CountedAnswer = tuple[str, int, bool]  # an answer's text, the server's count, and whether it ended by itself


async def recount(
    answers: Iterable[CountedAnswer],
    counter: TokenCounter,
    client: HttpClient,
    prompts: Sequence[BuiltRequest],
    *,
    stream: bool,
    past_ends: bool,
) -> TokenCheck | None:
    """None where there is nothing to count.

    An answer that goes on past its ends holds tokens that are in no text. So where answers did (`past_ends`) and the
    counts are apart, `prompts` are asked, whose answers may end, and those decide.
    """
    found = await check(answers, counter)
    if found is None or found.difference <= MOST_DIFFERENCE or not past_ends:
        return found
    ended: list[CountedAnswer] = []
    for prompt in prompts:
        answer = TimedResponse(stream=stream, keep_text=True)
        await client.ask(prompt.request, answer)
        if not stream:
            answer.whole()
        if not answer.error and answer.output_tokens is not None and not answer.tools:
            text = "".join(answer.thought) + "".join(answer.said)
            ended.append((text, answer.output_tokens, answer.finish == "stop"))
    again = await check(ended, counter)
    if again is None or again.usage < _LEAST_TOKENS:
        return found
    again.past_ends = found.difference
    return again


async def check(answers: Iterable[tuple[str, int, bool]], counter: TokenCounter) -> TokenCheck | None:
    """Of answers: their text, the server's count, and whether they ended by themselves. None where there is none.

    The token that ends an answer is in the server's count, or it is not; it is in no text. Either is right.
    """
    number = usage = counted = 0
    for text, said, ended in answers:
        ours = await counter.count(text)
        number += 1
        usage += said
        counted += min(ours + 1, max(ours, said)) if ended else ours
    if not usage:
        return None
    return TokenCheck(
        answers=number, usage=usage, counted=counted, by=counter.by, difference=abs(counted - usage) / usage
    )
