"""Checks a server's counts of output tokens by recounting the texts of some answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from headrace.bench.client.http_client import HttpClient
from headrace.bench.client.timed_response import TimedResponse
from headrace.bench.load_generator.request_builder import BuiltRequest
from headrace.bench.load_generator.token_counters import TokenCounter
from headrace.bench.results.benchmark_result import TokenCheck

MOST_DIFFERENCE: Final = 0.05  # between the server's count of output tokens and ours
_LEAST_TOKENS: Final = 32  # fewer show nothing about how a server counts

CountedAnswer = tuple[str, int, bool]  # text, the server's count, and whether the model ended the answer


async def check_tokens(
    answers: Iterable[CountedAnswer],
    counter: TokenCounter,
    client: HttpClient,
    prompts: Sequence[BuiltRequest],
    *,
    stream: bool,
    past_ends: bool,
) -> TokenCheck | None:
    """Recount the answers; return None if there is nothing to count.

    An answer that continues past its end tokens has tokens that its text does not show. If answers did (`past_ends`)
    and the counts differ, `prompts`, whose answers may end, are sent and decide instead.
    """
    result = await compare_counts(answers, counter)
    if result is None or result.difference <= MOST_DIFFERENCE or not past_ends:
        return result
    ended: list[CountedAnswer] = []
    for prompt in prompts:
        answer = TimedResponse(stream=stream, keep_text=True)
        await client.send(prompt.request, answer)
        if not stream:
            answer.read_whole()
        if not answer.error and answer.output_tokens is not None and not answer.tools:
            text = "".join(answer.reasoning_parts) + "".join(answer.content_parts)
            ended.append((text, answer.output_tokens, answer.finish == "stop"))
    again = await compare_counts(ended, counter)
    if again is None or again.usage < _LEAST_TOKENS:
        return result
    again.past_ends = result.difference
    return again


async def compare_counts(answers: Iterable[CountedAnswer], counter: TokenCounter) -> TokenCheck | None:
    """Compare the server's counts with ours; return None without any.

    A server may count the token that ends an answer or not; it is never in the text.
    """
    number = usage = counted = 0
    for text, reported, ended in answers:
        ours = await counter.count(text)
        number += 1
        usage += reported
        counted += min(ours + 1, max(ours, reported)) if ended else ours
    if not usage:
        return None
    return TokenCheck(
        answers=number, usage=usage, counted=counted, by=counter.by, difference=abs(counted - usage) / usage
    )
