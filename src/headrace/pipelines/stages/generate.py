"""The generate stage: the answer, by the first of the declared ways that can give one, or by what is known.

Yields the text as it comes. Checking citations and cutting sentences is answer_delivery's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from msgspec.structs import replace

from headrace.gateway.api_errors import ApiError
from headrace.gateway.degradation.ladder.extractive_answer import extract_answer
from headrace.gateway.degradation.shaping.fast_profile import has_fixed_format
from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    PipelineOptions,
    RestartDelta,
    TextRequest,
)
from headrace.gateway.routing.confidence import Confidence
from headrace.pipelines.model_call import stream_call
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_clock import StageLateError
from headrace.pipelines.stage_services import StageServices

SHORT: Final = "Answer in one short sentence."
DETAIL: Final = "Answer in full, with the details."
_INCOMPLETE: Final = (
    "Some information could not be fetched in time. Answer from what is known, and say what is missing."
)
_SMALL_SHARE: Final = 0.5  # of the time left, that the small model may take when a large one may follow


async def generate(services: StageServices, state: RunState, end: float) -> AsyncGenerator[ChoiceDelta]:
    """Yield the answer's deltas, without a finish. Sets `state.finish` and `state.answered_by`.

    StageLateError or ApiError if nothing was said; once text was yielded, the answer ends there instead.
    """
    config = state.config.generate
    ways = [way for way in config.order if way != "cache"]
    given = state.exchange.text_request
    fits = may_stand_in(state) and given.max_tokens is None and not given.stop
    if fits and state.draft and not state.sources and answer_model(state) == (state.config.tools.model or state.model):
        state.answered_by = "agent"  # the same model has answered without any tool
        yield ChoiceDelta(0, content=state.draft)
        return
    for place, way in enumerate(ways):
        if way == "extract":
            if may_stand_in(state) and (text := extracted(state, config.extract_confidence)) is not None:
                state.answered_by = "extract"
                yield ChoiceDelta(0, content=text)
                return
        elif way == "small":
            choice = await _confident_choice(services, state, end, is_last=place == len(ways) - 1)
            if choice is not None:
                state.answered_by, state.finish = "small", choice.finish
                yield ChoiceDelta(0, content=choice.content)
                return
        else:
            if len(config.order) > 1:
                state.answered_by = "large"
            async with aclosing(_stream(services, state, answer_request(state, answer_model(state)), end)) as deltas:
                async for delta in deltas:
                    yield delta
            return
    raise StageLateError


def may_stand_in(state: RunState) -> bool:
    """True if another text may replace the one that the model would write: no program reads it in a fixed format, and
    no client inspects its tokens."""
    request = state.exchange.text_request
    return not has_fixed_format(request) and request.sampling.logprobs is None


async def _stream(
    services: StageServices, state: RunState, request: TextRequest, end: float
) -> AsyncGenerator[ChoiceDelta]:
    said = False
    try:
        async with aclosing(stream_call(services, state, request, end, shares_timeline=True)) as deltas:
            async for delta in deltas:
                if delta.finish is not None:
                    state.finish = delta.finish
                    delta = replace(delta, finish=None, usage=None)
                said = said or bool(delta.content)
                if isinstance(delta, RestartDelta):
                    said = False
                yield delta
    except StageLateError:
        if not said:
            raise
        state.finish = "deadline"
    except ApiError as error:
        if not said:
            raise
        state.finish, state.broken = "length", error
    if state.finish == "deadline" and not said:
        raise StageLateError


async def _confident_choice(services: StageServices, state: RunState, end: float, *, is_last: bool) -> Choice | None:
    """Return the small model's answer, if it is complete and confident enough or if no other model follows."""
    config = state.config.generate
    request = answer_request(state, config.small or answer_model(state))
    request = request.but(sampling=replace(request.sampling, logprobs=0))
    now = services.clock.now()
    choice, confidence = Choice(0), Confidence()
    try:
        call = stream_call(services, state, request, end if is_last else now + (end - now) * _SMALL_SHARE)
        async with aclosing(call) as deltas:
            async for delta in deltas:
                if isinstance(delta, RestartDelta):
                    choice, confidence = Choice(0), Confidence()
                    continue
                choice.add(delta)
                for token in delta.logprobs or ():
                    if token.logprob is not None:
                        confidence.add(token.logprob)
    except (StageLateError, ApiError):
        if is_last:
            raise
        return None
    sure = choice.finish == "stop" and confidence.value("mean") >= config.small_confidence
    return choice if choice.content.strip() and (sure or is_last) else None


def extracted(state: RunState, least: float = 0.0) -> str | None:
    """Return an answer of the sources' own sentences. None if they have none, or if it is not confident enough."""
    if not state.sources or not state.question:
        return None
    passages = {hit.id: hit.text for hit in state.hits}  # without the headings above them, which are no sentences
    sources = [replace(each, text=passages.get(each.id, each.text)) for each in state.sources]
    answer = extract_answer(state.question, sources)
    if not answer.quotes or answer.confidence < least:
        return None
    state.is_extracted = True
    return answer.text


def rescue(state: RunState) -> str | None:
    """Return an answer from what is known when no model could give one: sentences of the sources, a draft of the
    tools' loop, or the sources themselves."""
    if (text := extracted(state)) is not None:
        return text
    if state.draft:
        return state.draft
    if state.sources:
        state.is_extracted = True
        first = state.sources[0].text.strip()
        return f"{first[:400].rstrip()} [1]"
    return None


def answer_request(state: RunState, model: str) -> TextRequest:
    """Return the request for the model that writes the answer."""
    config, given = state.config, state.exchange.text_request
    most = config.generate.max_tokens
    ending = ""
    if config.mode == "answer-first":
        ending = DETAIL if given.pipeline.detail else SHORT
        if not given.pipeline.detail:
            most = config.short_tokens
    if state.conclusion not in ("", "answered"):
        ending = f"{ending} {_INCOMPLETE}".strip()
    if given.max_tokens is not None:
        most = given.max_tokens if most is None else min(most, given.max_tokens)
    return given.but(
        model=model,
        messages=with_instructions(given.messages or [], config.generate.instructions, ending),
        sources=state.sources,
        max_tokens=most,
        surface=state.surface,
        pipeline=PipelineOptions(),
        profile="standard",
        show_reasoning=False,
    )


def with_instructions(messages: list[dict[str, Any]], instructions: str, ending: str) -> list[dict[str, Any]]:
    """Put instructions before the conversation, and an `ending` behind the last question.

    What differs from one request to the next stands last, so that the prompt's beginning is found in the prefix cache.
    """
    result = list(messages)
    if instructions:
        if result and result[0]["role"] == "system":
            result[0] = {**result[0], "content": f"{instructions}\n\n{result[0].get('content') or ''}".strip()}
        else:
            result.insert(0, {"role": "system", "content": instructions})
    if ending and result:
        last = max((place for place, each in enumerate(result) if each["role"] == "user"), default=None)
        if last is not None:
            result[last] = {**result[last], "content": f"{result[last].get('content') or ''}\n\n{ending}".strip()}
    return result


def answer_model(state: RunState) -> str:
    """Return the model that writes the answer, unless a small one is sure."""
    return state.config.generate.model or state.model
