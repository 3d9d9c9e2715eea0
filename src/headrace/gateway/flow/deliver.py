"""Deliver: pieces go out as they come, as far as limits and budgets let them."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.in_flight import FlightReader
from headrace.gateway.degradation.ladder import ladder_steps as ladder
from headrace.gateway.degradation.shaping.sources import find_citations
from headrace.gateway.flow.course import Course, Take
from headrace.gateway.flow.recall import instead, refused_by_ladder
from headrace.gateway.flow.settle import settle
from headrace.gateway.requests.text_request import ChoiceDelta, RestartDelta, TokenUsage, combine_usages
from headrace.gateway.routing.composite_answerer import choice_count, sum_usage


async def run(course: Course, take: Take) -> bool:
    """Hands every piece to `take` as it comes. True once every choice has ended; False as soon as `take` wants no
    more for now, and then this is to be called again. ApiError where the answer is refused or fails."""
    assert course.answer is not None
    try:
        if course.wait is not None:
            ended = await _follow_in_time(course, take)
        else:
            ended = await (_follow(course, take) if course.looks else course.answer.run(take))
    except ApiError as error:
        if course.exchange.first_at or course.gone or not instead(course, error):
            raise
        ended = await _follow(course, take)
    if ended and not course.gone:
        if course.selected is not None and course.selected.sources:
            told = find_citations("".join(piece.content for piece in course.said), course.selected)
            course.exchange.notes["citations"] = [
                {"number": each.number, "id": each.id, "start": each.start, "end": each.end} for each in told
            ]
        settle(course)  # before the client hears of the end: a charge is written down by then
    return ended


async def _follow_in_time(course: Course, take: Take) -> bool:
    """As _follow. How long a request waits is foreseen when it comes, and may be foreseen badly: one that has waited
    for as long as its surface has patience, on a ladder of which steps are taken, waits no more."""
    exchange, services = course.exchange, course.services
    loop = asyncio.get_running_loop()
    left = services.ladder.patience_s(exchange.surface) - (time.monotonic() - exchange.arrival)
    level = services.ladder.bottom(exchange.surface)
    timer = None
    try:
        async with asyncio.timeout(None) as bound:
            course.bound = bound

            def weary() -> None:
                if course.wait is not None and services.ladder.number(exchange.surface, course.standing):
                    bound.reschedule(loop.time())

            if level.name == "refuse" and left < math.inf:
                timer = loop.call_later(max(0.0, left), weary)
            return await _follow(course, take)
    except TimeoutError:
        if course.wait is None:
            raise
        if course.gone:
            return True
        course.signals = services.pressure.signals(exchange.served.name, exchange.caller.tenant)
    finally:
        course.bound = None
        if timer is not None:
            timer.cancel()
    error = ladder.overload_error(level, course.signals)
    if instead(course, error):
        return await _follow(course, take)
    if course.answer is not None:
        course.answer.cancel()
    refused_by_ladder(course)
    raise error


async def _follow(course: Course, take: Take) -> bool:
    while True:
        if course.held is not None and not await _let_out(course, take):
            return True
        if course.held is not None:
            piece, course.held = course.held, None
            if not take(piece):
                return False
        assert course.answer is not None
        ended = await course.answer.run(partial(_look_at, course, take))
        if course.held is None:
            return ended


def _look_at(course: Course, take: Take, piece: ChoiceDelta) -> bool:
    exchange = course.exchange
    if course.wait is not None and course.bound is not None:
        if course.bound.expired():
            return False  # it is given up in this very turn
        course.bound.reschedule(None)
    if course.follows:
        exchange.last_at = time.monotonic()
        exchange.first_at = exchange.first_at or exchange.last_at
    if course.wait is not None:
        course.wait.start()
        course.wait = None
    if (course.selected is not None or course.recall is not None) and piece.index == 0:
        if isinstance(piece, RestartDelta):
            course.said.clear()
        course.said.append(piece)
    if (shared := course.shared) is not None:
        exchange.served = shared.exchange.served  # who answers may have changed
    if piece.tokens:
        count = course.out + piece.tokens
        if _pays(course) and not _corrects(course, piece) and not _may(course, count):
            course.held = piece
            return False
        course.out = count
        course.tokens[piece.index] = course.tokens.get(piece.index, 0) + piece.tokens
    if piece.finish is not None:
        _ended(course, piece)
    return take(piece)


def _pays(course: Course) -> bool:
    """For what is generated, as things stand: where whoever began it leaves, another goes on paying."""
    return course.answer.pays if isinstance(course.answer, FlightReader) else not course.exchange.answered_by


def _corrects(course: Course, piece: ChoiceDelta) -> bool:
    """An upstream's word on how many tokens there were comes after the text, or with all of it at once: nothing is
    left to stop then, and they are counted in the end."""
    if course.exchange.served.upstream is None or piece.finish is None:
        return False
    return not piece.content or not course.tokens.get(piece.index)


def _ended(course: Course, piece: ChoiceDelta) -> None:
    exchange = course.exchange
    course.usages[piece.index] = piece.usage or TokenUsage()
    if course.follows:
        exchange.usage = combine_usages([course.usages[index] for index in sorted(course.usages)], exchange.asked.n)
        exchange.finish = piece.finish or ""


def _may(course: Course, count: int) -> bool:
    """Whether the answer may be so many tokens long: of the limits, and then of the budgets."""
    if course.reservation is not None and not course.reservation.allow(count):
        return False
    if course.charged:
        assert course.services.ledger is not None
        if not course.services.ledger.progress(course.exchange.id, count):
            course.exchange.cut_by = "budget"
            return False
    return True


async def _let_out(course: Course, take: Take) -> bool:
    """Waits until the piece that is held may go. False: it never may, and the answer has ended."""
    piece = course.held
    assert piece is not None
    exchange = course.exchange
    count = course.out + piece.tokens
    if not exchange.cut_by:
        assert course.reservation is not None
        course.waits = asyncio.ensure_future(course.reservation.extend(count))
        try:
            granted = await course.waits
        except asyncio.CancelledError:
            if not course.gone:
                raise
            granted = False
        finally:
            course.waits.cancel()
            course.waits = None
        if course.gone:
            course.held = None
            return False
        if not granted or not _may(course, count):
            exchange.cut_by = exchange.cut_by or "limit"
    if not exchange.cut_by:
        course.out = count
        course.tokens[piece.index] = course.tokens.get(piece.index, 0) + piece.tokens
        if piece.finish is not None:
            _ended(course, piece)
        return True
    course.held = None
    _stop(course, take)
    return False


def _stop(course: Course, take: Take) -> None:
    """Ends what has not ended, with what there is of it."""
    exchange = course.exchange
    assert course.answer is not None
    course.answer.cancel()
    prompts = exchange.prompts.get(exchange.served.name) or ()
    for index in range(choice_count(exchange.asked)):
        if index in course.usages:
            continue
        place = index // exchange.asked.n
        # Of an upstream's prompts only the sum is known, which the first one stands for.
        length = len(prompts[place].tokens) if prompts else exchange.prompt_tokens if place == 0 else 0
        usage = TokenUsage(prompt_tokens=length, output_tokens=course.tokens.get(index, 0))
        if index == 0:
            usage = sum_usage((*(charge.usage for charge in course.tried()), usage))
        course.usages[index] = usage
        take(ChoiceDelta(index, finish="length", usage=usage))
    exchange.notes["cut"] = exchange.cut_by
