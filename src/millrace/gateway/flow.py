"""The way of a request for text, from top to bottom.

    identify   whose it is: its surface; fast mode and the fast profile
    route      model → variant: rules, splits, cascades, chains
    degrade    under pressure less is asked for, as declared
    shape      sources, conversations that fit; messages → prompt → tokens
    admit      limits and budgets, reserved before anything is computed
    recall     an answer that is there already: exact, semantic, from the sources
    generate   one of an engine, an upstream, or several of them
    settle     always, once: what was used is counted, charged and kept

Owns the order of the stages and what goes from one to the next. What a stage does is its own package's, which of them
there are Parts'. Dialects and the network are the callers': to them a Way is begun, run, cancelled and settled.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from millrace.gateway.answering import prompts_of
from millrace.gateway.asked import Choice, Piece, Restart, Usage, total
from millrace.gateway.caches.exact import Alone, Answer, Hit, Looked
from millrace.gateway.caches.flight import Facts, Reader, Source, Terms
from millrace.gateway.caches.key import wanted_of
from millrace.gateway.errors import ApiError
from millrace.gateway.exchange import Exchange
from millrace.gateway.ladder import steps as ladder
from millrace.gateway.ladder.extract import asked_of, extract
from millrace.gateway.ladder.levels import Signals
from millrace.gateway.ladder.pressure import Wait
from millrace.gateway.ledger.budgets import Fallback, Refuse
from millrace.gateway.ledger.records import Entry
from millrace.gateway.limits.limit_set import Scope
from millrace.gateway.limits.limiter import Reservation
from millrace.gateway.routing.compose import decisions_of
from millrace.gateway.routing.parts import Answers, Charge, Composed, count_of, part_of, summed
from millrace.gateway.routing.router import Plan, headers_of
from millrace.gateway.semantic.entry import answer_of, primed
from millrace.gateway.semantic.semantic import Recall
from millrace.gateway.shaping.fast import fast, shortened
from millrace.gateway.shaping.fitting import fitted, numbered
from millrace.gateway.shaping.sources import Selected, citations
from millrace.gateway.shaping.told import Shaped, header_value
from millrace.gateway.tenants.access import allows_model, surface_of
from millrace.gateway.upstreams.answering import UpstreamAnswering
from millrace.observe import metrics

if TYPE_CHECKING:
    from millrace.gateway.parts import Parts

Take = Callable[[Piece], bool]
_REFUSED = frozenset(  # by who was to answer, for want of room or time
    {
        "overloaded",
        "deadline_unreachable",
        "upstream_unavailable",
        "upstream_busy",
        "upstream_overloaded",
        "upstream_unreachable",
        "upstream_rate_limit",
        "engine_lost",
        "variant_unavailable",
        "too_late",
    }
)
_ENDED = {"stop": "finished", "tool_calls": "finished", "length": "limited", "deadline": "deadline"}


class Way:
    """One exchange on its way. All of it belongs to one event loop."""

    def __init__(self, exchange: Exchange, parts: Parts) -> None:
        self.exchange = exchange
        self.gone = False  # the client has left
        self._parts = parts
        self._plan = Plan(exchange.served.name)
        self._telling = ladder.Telling()  # what the ladder did
        self._shaped: list[Shaped] = []  # what shaping did beside it
        self._degraded: ladder.Degraded | None = None
        self._whole: Exchange | None = None  # as it was before it was degraded
        self._signals = Signals()
        self._standing = ""  # whose place on the ladder is its own
        self._selected: Selected | None = None  # the sources, by their numbers
        self._named = exchange.served.name  # the variant that would answer, had nothing been routed
        self._reservation: Reservation | None = None
        self._charged = False  # the ledger expects to be told of it
        self._looked: Looked | None = None
        self._recall: Recall | None = None
        self._answer: Answer | None = None
        self._own: Answers | None = None  # what generates, where nobody shares it
        self._follows = False  # the pieces come from elsewhere, so what they say is noted here
        self._looks = False  # every piece is looked at
        self._held: Piece | None = None  # that is not let out yet
        self._waits: asyncio.Future[bool] | None = None  # until it may be
        self._out = 0  # tokens let out
        self._wait: Wait | None = None  # before the first token
        self._bound: asyncio.Timeout | None = None  # of that
        self._usages: dict[int, Usage] = {}  # of the choices that have ended
        self._tokens: dict[int, int] = {}  # let out, by choice
        self._said: list[Piece] = []  # of the first choice, where what it says is needed
        self._free = False  # nothing was computed for it
        self._refused = False  # nothing was done for it
        self._settled = False

    async def begin(self) -> None:
        """Everything that can be refused before an engine knows of it; ApiError where it is."""
        self._identify()
        self._route()
        self._degrade()
        await self._shape()
        await self._prime()
        await self._admit()
        if not await self._recalled() and not self.gone:
            try:
                await self._generate()
            except ApiError as error:
                if not self._instead(error):
                    raise
        self._looks = self._follows or self._reservation is not None or self._charged or self._wait is not None
        self._looks = self._looks or self._selected is not None or self._recall is not None
        if isinstance(self._answer, Hit) and self._selected is None:
            self._looks = False  # what its pieces would say is known

    # Identify

    def _identify(self) -> None:
        exchange, parts = self.exchange, self._parts
        asked = exchange.asked
        surface = surface_of(exchange.caller, asked.surface, exchange.served.surface)
        exchange.surface = surface
        if asked.surface != surface:
            exchange.asked = asked = replace(asked, surface=surface)
        if asked.profile == "fast":
            exchange.asked, shaped = fast(asked, parts.fast_options, reasons=exchange.served.reasoning is not None)
            self._shaped += shaped
        switch = parts.switches.fast(exchange.caller.tenant, exchange.served.name)
        if switch is None:
            return
        exchange.headers["x-millrace-fast"] = "on"
        if switch.variant is not None:
            exchange.served = parts.fleet.served[switch.variant]
        asked = exchange.asked
        if switch.slow_tools and asked.tools and asked.choosing == "auto":
            left = tuple(tool for tool in asked.tools if tool.name not in switch.slow_tools)
            if len(left) < len(asked.tools):
                self._shaped.append(Shaped("tools", len(asked.tools), len(left)))
                exchange.asked = replace(asked, tools=left)
        if switch.max_tokens is not None:  # after the tools: an answer that may be a call is not cut
            exchange.asked, shaped = shortened(exchange.asked, switch.max_tokens)
            self._shaped += shaped
        self._most_prompt = switch.prompt_tokens

    _most_prompt: int | None = None  # tokens, of fast mode

    # Route

    def _route(self) -> None:
        exchange, parts = self.exchange, self._parts
        if parts.router.idle:
            self._plan = Plan(exchange.served.name)
        else:
            self._plan = plan = parts.router.route(exchange)
            exchange.served = parts.fleet.served[plan.variant]
        if exchange.served.kind != "decoder":
            raise ApiError(f"'{exchange.served.name}' makes embeddings, not text", parameter="model")

    # Degrade

    def _degrade(self) -> None:
        exchange, parts = self.exchange, self._parts
        if not parts.degrades(exchange.surface):
            return
        asked, served, tenant = exchange.asked, exchange.served, exchange.caller.tenant
        settings = parts.settings_of(exchange.caller)
        deadline = asked.deadline_s if asked.deadline_s is not None else served.deadlines.get(exchange.surface)
        self._signals = parts.pressure.signals(
            served.name,
            tenant,
            surface=exchange.surface,
            deadline_s=None if deadline is None else deadline - (time.monotonic() - exchange.arrival),
            max_tokens=asked.max_tokens,
            budget_left=parts.budget_left(tenant, exchange.endpoint),
        )
        self._standing = f"{served.name}\n{tenant}"
        level = parts.ladder.decide(exchange.surface, self._signals, of=self._standing)
        if not level.number:
            return
        allowed = ladder.Allowed.of(asked.degrade, None if settings.ladder else "off")
        self._degraded = degraded = ladder.apply(level, asked, allowed)
        self._whole = part_of(exchange, served, asked)
        smaller = ladder.smaller(served.name, degraded.variants, parts.fleet.served)
        if smaller is not None and not allows_model(exchange.caller, smaller):
            smaller = None
        if smaller is not None and not self._plan.steps and self._plan.cascade is None:
            exchange.served = parts.fleet.served[smaller]
            self._plan = Plan(smaller, decisions=self._plan.decisions)
            self._telling.took("variant", Shaped("variant", served.name, smaller))
        exchange.asked, shaped = ladder.cut(asked, degraded)
        self._telling.took("max_tokens", *shaped)

    # Shape

    async def _shape(self) -> None:
        exchange, parts = self.exchange, self._parts
        asked, degraded = exchange.asked, self._degraded
        if asked.messages is not None:
            most = None if degraded is None else degraded.sources_tokens
            exchange.asked, self._selected, shaped = numbered(asked, exchange.served, parts.sources_options(most))
            budget, history = self._most_prompt, None if degraded is None else degraded.history_tokens
            if history is not None:
                own = history + (0 if self._selected is None else self._selected.tokens)
                budget = own if budget is None else min(budget, own)
            # Under pressure nobody is asked for a summary.
            summariser = parts.summariser(exchange) if degraded is None else None
            changed = await fitted(exchange.asked, exchange.served, parts.shaping, budget, summariser)
            exchange.asked = changed.asked
            if history is not None:
                self._telling.took("trim", *(each for each in shaped if each.step == "sources"), *changed.shaped)
                self._shaped += (each for each in shaped if each.step != "sources")
            else:
                self._shaped += (*shaped, *changed.shaped)
        await self._measure()

    async def _measure(self) -> None:
        """How long the prompt is."""
        exchange = self.exchange
        if exchange.served.upstream is not None:
            exchange.prompt_tokens = await self._parts.prompt_tokens(exchange)
        else:
            await prompts_of(exchange)

    async def _prime(self) -> None:
        """An example is a part of the prompt: it is looked for before the prompt is paid for, where the exact cache has
        no answer, and left out where there is no room for it."""
        exchange, parts = self.exchange, self._parts
        if parts.semantic is None or parts.semantic.options.serve != "prime" or self._degraded is not None:
            return
        uses = parts.semantic.modes.uses(exchange.caller.tenant, wish=exchange.asked.cache)
        if uses.looks and await self._exact(stale=False) is None:
            recall = self._recall = await parts.recall(exchange, self._plan)
            if recall.entry is None or recall.outcome != "hit":
                return
            asked, prompts, length = exchange.asked, exchange.prompts, exchange.prompt_tokens
            exchange.asked, exchange.prompts = primed(asked, recall.entry), {}
            try:
                await self._measure()
            except ApiError:
                exchange.asked, exchange.prompts, exchange.prompt_tokens = asked, prompts, length
                return
            self._looked = None  # what is answered now is neither kept as the answer to this very request nor shared
            exchange.headers["x-millrace-cache"] = exchange.notes["cache"] = "primed"

    # Admit

    async def _admit(self) -> None:
        """Limits first: a budget is not held for what is refused anyway."""
        exchange, parts = self.exchange, self._parts
        caller = exchange.caller
        scopes = parts.scopes(caller, exchange.served.name, exchange.surface)
        if not scopes and parts.ledger is None:
            return
        most = await self._limit(scopes)
        if parts.ledger is not None:
            await self._budget(most, scopes)

    async def _limit(self, scopes: Sequence[Scope]) -> int:
        """How many tokens all answers together may have, once the limits have let it in."""
        exchange, parts = self.exchange, self._parts
        caller = exchange.caller
        count = count_of(exchange.asked)
        most = self._most_tokens() * count
        if not scopes:
            return most
        self._reservation = await parts.limiter.reserve(
            scopes,
            input_tokens=exchange.prompt_tokens,
            most_output=most,
            tenant=caller.tenant,
            surface=exchange.surface,
            closed=parts.settings_of(caller).fail == "closed",
        )
        exchange.headers |= self._reservation.headers()
        if self._reservation.most_output < most:
            most = max(count, self._reservation.most_output)
            exchange.asked = replace(exchange.asked, max_tokens=most // count)
        return most

    def _most_tokens(self) -> int:
        """Of one answer."""
        exchange = self.exchange
        prompts = exchange.prompts.get(exchange.served.name)
        longest = max(len(prompt.tokens) for prompt in prompts) if prompts else exchange.prompt_tokens
        room = max(1, exchange.served.context - longest)
        asked = exchange.asked.max_tokens
        most = asked if asked is not None else exchange.served.max_tokens
        return room if most is None else min(most, room)

    async def _budget(self, most: int, scopes: Sequence[Scope]) -> None:
        """`scopes`: of the limits that have let it in."""
        exchange, parts = self.exchange, self._parts
        assert parts.ledger is not None
        caller = exchange.caller
        likely = parts.limiter.estimates.tokens(caller.tenant, exchange.surface, most)
        verdict = await parts.ledger.reserve(self._entry(), output_tokens=likely, most_tokens=most)
        if isinstance(verdict, Fallback):
            self._shaped.append(Shaped("budget", exchange.served.name, verdict.variant))
            exchange.served = parts.fleet.served[verdict.variant]
            self._plan = Plan(verdict.variant, decisions=self._plan.decisions)
            self._looked = self._recall = None  # they were of the other variant
            await self._measure()
            others = parts.scopes(caller, exchange.served.name, exchange.surface)
            if others != scopes:  # the other variant has limits of its own
                if self._reservation is not None:
                    self._reservation.release_soon()
                    self._reservation = None
                most = await self._limit(others)
            else:
                most = min(most, self._most_tokens() * count_of(exchange.asked))
            entry = self._entry()
            verdict = await parts.ledger.reserve(entry, output_tokens=likely, most_tokens=most, falls=False)
        if isinstance(verdict, Refuse):
            raise verdict.error()
        self._charged = True

    def _entry(self, *, id: str = "", variant: str = "", counted: bool = True) -> Entry:
        exchange, caller = self.exchange, self.exchange.caller
        return Entry(
            id=id or exchange.id,
            tenant=caller.tenant,
            endpoint=exchange.endpoint or "-",
            model=exchange.asked.model or self._named,
            variant=variant or exchange.served.name,
            key=caller.key,
            surface=exchange.surface,
            prompt_tokens=exchange.prompt_tokens,
            counted=counted,
        )

    # Recall

    async def _recalled(self) -> bool:
        """Whether there is an answer that nobody needs to generate."""
        exchange, parts, degraded = self.exchange, self._parts, self._degraded
        stale = degraded is not None and degraded.stale_s is not None
        if self._recall is None and (hit := await self._exact(stale=stale)) is not None:
            self._hit(hit, "stale" if hit.stale else "exact", f"age={hit.age_s:.0f}")
            if hit.stale:
                self._telling.took("stale", Shaped("age_s", None, round(hit.age_s)))
            return True
        if parts.semantic is not None and self._recall is None:
            recall = self._recall = await parts.recall(exchange, self._plan)
            served = recall.outcome == "hit" and parts.semantic.options.serve == "answer"
            if served and recall.entry is not None:
                answer = recall.entry.answer
                pieces = answer.pieces(prompt_tokens=exchange.prompt_tokens)
                self._hit(Hit(pieces, n=1, machine_s=answer.machine_s), "semantic", "")
                if recall.check:
                    parts.check_later(exchange, recall)
                return True
        if degraded is None:
            return False
        if degraded.extract and self._extracted():
            return True
        if degraded.refuse:
            self._refused_by_ladder()
            raise ladder.refusal(degraded.level, self._signals)
        return False

    async def _exact(self, *, stale: bool) -> Hit | None:
        """The exact cache's, which is asked once."""
        exchange, exact = self.exchange, self._parts.exact
        if exact is None or not exact.modes.uses(exchange.caller.tenant, wish=exchange.asked.cache).looks:
            return None
        return await self._hit_of(stale=stale) if self._looked is None else self._looked.hit

    async def _hit_of(self, *, stale: bool) -> Hit | None:
        """What was kept of this very request: first of what was asked, then of what has become of it."""
        if self._whole is not None and self._whole.served.upstream is None:
            whole = self._whole
            if whole.asked is not self.exchange.asked or whole.served is not self.exchange.served:
                whole.prompts = {}
                with suppress(ApiError):  # what was too long before it was trimmed was never kept
                    whole.asked = numbered(whole.asked, whole.served, self._parts.sources_options(None))[0]
                    whole.asked = (await fitted(whole.asked, whole.served, self._parts.shaping, None, None)).asked
                    await prompts_of(whole)
                    if (hit := await self._look(whole, stale=stale)) is not None:
                        self.exchange.served = whole.served
                        self._telling.clear()  # nothing was made less of it
                        return hit
        return await self._look(self.exchange, stale=stale)

    async def _look(self, exchange: Exchange, *, stale: bool) -> Hit | None:
        parts, plan = self._parts, self._plan
        assert parts.exact is not None
        prompts = exchange.prompts.get(exchange.served.name)
        wanted = wanted_of(
            tenant=exchange.caller.tenant,
            served=exchange.served,
            asked=exchange.asked,
            prompts=None if prompts is None else [prompt.tokens for prompt in prompts],
            seeded=exchange.asked.seeded,
            policy=f"{parts.config.cache.exact.policy}\n{plan.small or ''}",
        )
        self._looked = looked = await parts.exact.look(wanted, wish=exchange.asked.cache, stale=stale)
        hit, degraded = looked.hit, self._degraded
        if hit is not None and hit.stale and wanted is not None and degraded is not None:
            expired = hit.age_s - parts.exact.ttl(wanted.tags)
            return hit if expired <= (degraded.stale_s or 0.0) else None
        return hit

    def _hit(self, answer: Hit, by: str, what: str) -> None:
        self._answer, self._follows = answer, True
        self.exchange.by = by
        self.exchange.headers["x-millrace-cache"] = f"{by}; {what}" if what else by
        self.exchange.notes["cache"] = by

    def _extracted(self) -> bool:
        """From the request's own sources, where it has any."""
        exchange = self.exchange
        given = () if self._selected is None else self._selected.sources
        question, before, sources = asked_of(exchange.asked.messages or (), given)
        if not sources or not question:
            return False
        found = extract(question, sources, before=before)
        exchange.notes |= {
            "extracted": True,
            "confidence": round(found.confidence, 4),
            "citations": [
                {"number": each.number, "id": each.id, "start": each.start, "end": each.end} for each in found.quotes
            ],
        }
        self._selected = None
        self._telling.clear("max_tokens", "variant")  # which nothing came of
        self._telling.took("extract", Shaped("quotes", None, len(found.quotes)))
        pieces = [Piece(0, content=found.text), Piece(0, finish="stop", usage=Usage())]
        self._answer, self._follows = Hit(pieces, n=1), True
        exchange.by = "extract"
        return True

    # Generate

    async def _generate(self) -> None:
        exchange, parts = self.exchange, self._parts
        looked = self._looked
        if parts.exact is not None and looked is not None and looked.uses.looks:
            shared, plan = part_of(exchange, exchange.served, exchange.asked), self._plan
            whole = bool(plan.steps) and not exchange.asked.stream
            terms = Terms(self._deadline(), exchange.surface, exchange.asked.priority, whole)
            self._answer = parts.exact.generate(looked, terms, lambda: Shared(parts.answers(shared, plan), plan))
            self._follows = True
            if self._answer.role == "joiner":
                exchange.by = "shared"
                exchange.headers["x-millrace-cache"] = exchange.notes["cache"] = "shared"
        else:
            self._own = parts.answers(exchange, self._plan)
            await self._own.begin()
            self._answer = Alone(self._own)
        if parts.degrades(exchange.surface):
            self._wait = parts.pressure.wait(exchange.served.name, exchange.caller.tenant)

    def _deadline(self) -> float | None:
        exchange = self.exchange
        seconds = exchange.asked.deadline_s
        if seconds is None:
            seconds = exchange.served.deadlines.get(exchange.surface)
        return None if seconds is None else exchange.arrival + seconds

    # Deliver

    async def run(self, take: Take) -> bool:
        """Hands every piece to `take` as it comes. True once every choice has ended; False as soon as `take` wants no
        more for now, and then this is to be called again. ApiError where the answer is refused or fails."""
        assert self._answer is not None
        try:
            if self._wait is not None:
                ended = await self._run_in_time(take)
            else:
                ended = await (self._run(take) if self._looks else self._answer.run(take))
        except ApiError as error:
            if self.exchange.first or self.gone or not self._instead(error):
                raise
            ended = await self._run(take)
        if ended and not self.gone:
            if self._selected is not None and self._selected.sources:
                told = citations("".join(piece.content for piece in self._said), self._selected)
                self.exchange.notes["citations"] = [
                    {"number": each.number, "id": each.id, "start": each.start, "end": each.end} for each in told
                ]
            self.settle()  # before the client hears of the end: a charge is written down by then
        return ended

    def relayed(self) -> UpstreamAnswering | None:
        """An upstream's answer whose bytes can go to a client as they are: nobody here wants to see a piece of it."""
        own = self._own
        return own if isinstance(own, UpstreamAnswering) and not self._looks and own.relayable() else None

    def _instead(self, error: ApiError) -> bool:
        """Where who answers refuses, or is not there: what the end of the surface's ladder has, before the client hears
        of it."""
        exchange, parts = self.exchange, self._parts
        if error.code not in _REFUSED or not parts.degrades(exchange.surface):
            return False
        before = self._answer
        allowed = ladder.Allowed.of(
            exchange.asked.degrade, None if parts.settings_of(exchange.caller).ladder else "off"
        )
        degraded = ladder.apply(parts.ladder.bottom(exchange.surface), exchange.asked, allowed)
        if not (degraded.extract and self._extracted()):
            return False
        if before is not None:
            before.cancel()
        if self._wait is not None:
            self._wait.over()  # it has had no first token
            self._wait = None
        self._looks = True
        return True

    def _refused_by_ladder(self) -> None:
        self._telling.clear()
        metrics.of(metrics.degraded, self.exchange.surface, "refuse").inc()

    async def _run_in_time(self, take: Take) -> bool:
        """As _run. How long a request waits is foreseen when it comes, and may be foreseen badly: one that has waited
        for as long as its surface has patience, on a ladder of which steps are taken, waits no more."""
        exchange, parts = self.exchange, self._parts
        loop = asyncio.get_running_loop()
        left = parts.patience(exchange.surface) - (time.monotonic() - exchange.arrival)
        level = parts.ladder.bottom(exchange.surface)
        timer = None
        try:
            async with asyncio.timeout(None) as bound:
                self._bound = bound

                def weary() -> None:
                    if self._wait is not None and parts.ladder.number(exchange.surface, self._standing):
                        bound.reschedule(loop.time())

                if level.name == "refuse" and left < math.inf:
                    timer = loop.call_later(max(0.0, left), weary)
                return await self._run(take)
        except TimeoutError:
            if self._wait is None:
                raise
            if self.gone:
                return True
            self._signals = parts.pressure.signals(exchange.served.name, exchange.caller.tenant)
        finally:
            self._bound = None
            if timer is not None:
                timer.cancel()
        error = ladder.refusal(level, self._signals)
        if self._instead(error):
            return await self._run(take)
        if self._answer is not None:
            self._answer.cancel()
        self._refused_by_ladder()
        raise error

    async def _run(self, take: Take) -> bool:
        while True:
            if self._held is not None and not await self._let_out(take):
                return True
            if self._held is not None:
                piece, self._held = self._held, None
                if not take(piece):
                    return False
            assert self._answer is not None
            ended = await self._answer.run(partial(self._look_at, take))
            if self._held is None:
                return ended

    def _look_at(self, take: Take, piece: Piece) -> bool:
        exchange = self.exchange
        if self._wait is not None and self._bound is not None:
            if self._bound.expired():
                return False  # it is given up in this very turn
            self._bound.reschedule(None)
        if self._follows:
            exchange.last = time.monotonic()
            exchange.first = exchange.first or exchange.last
        if self._wait is not None:
            self._wait.begun()
            self._wait = None
        if (self._selected is not None or self._recall is not None) and piece.index == 0:
            if isinstance(piece, Restart):
                self._said.clear()
            self._said.append(piece)
        if (shared := self._shared) is not None:
            exchange.served = shared.exchange.served  # who answers may have changed
        if piece.tokens:
            count = self._out + piece.tokens
            if self._pays() and not self._corrects(piece) and not self._may(count):
                self._held = piece
                return False
            self._out = count
            self._tokens[piece.index] = self._tokens.get(piece.index, 0) + piece.tokens
        if piece.finish is not None:
            self._ended(piece)
        return take(piece)

    @property
    def _shared(self) -> Shared | None:
        """What generates the answer, where others may have it, too."""
        source = None if self._answer is None else self._answer.source
        return source if isinstance(source, Shared) else None

    def _pays(self) -> bool:
        """For what is generated, as things stand: where whoever began it leaves, another goes on paying."""
        return self._answer.pays if isinstance(self._answer, Reader) else not self.exchange.by

    def _corrects(self, piece: Piece) -> bool:
        """An upstream's word on how many tokens there were comes after the text, or with all of it at once: nothing is
        left to stop then, and they are counted in the end."""
        if self.exchange.served.upstream is None or piece.finish is None:
            return False
        return not piece.content or not self._tokens.get(piece.index)

    def _ended(self, piece: Piece) -> None:
        exchange = self.exchange
        self._usages[piece.index] = piece.usage or Usage()
        if self._follows:
            exchange.usage = total([self._usages[index] for index in sorted(self._usages)], exchange.asked.n)
            exchange.finish = piece.finish or ""

    def _may(self, count: int) -> bool:
        """Whether the answer may be so many tokens long: of the limits, and then of the budgets."""
        if self._reservation is not None and not self._reservation.allow(count):
            return False
        if self._charged:
            assert self._parts.ledger is not None
            if not self._parts.ledger.progress(self.exchange.id, count):
                self.exchange.cut = "budget"
                return False
        return True

    async def _let_out(self, take: Take) -> bool:
        """Waits until the piece that is held may go. False: it never may, and the answer has ended."""
        piece = self._held
        assert piece is not None
        exchange = self.exchange
        count = self._out + piece.tokens
        if not exchange.cut:
            assert self._reservation is not None
            self._waits = asyncio.ensure_future(self._reservation.extend(count))
            try:
                granted = await self._waits
            except asyncio.CancelledError:
                if not self.gone:
                    raise
                granted = False
            finally:
                self._waits.cancel()
                self._waits = None
            if self.gone:
                self._held = None
                return False
            if not granted or not self._may(count):
                exchange.cut = exchange.cut or "limit"
        if not exchange.cut:
            self._out = count
            self._tokens[piece.index] = self._tokens.get(piece.index, 0) + piece.tokens
            if piece.finish is not None:
                self._ended(piece)
            return True
        self._held = None
        self._stop(take)
        return False

    def _stop(self, take: Take) -> None:
        """Ends what has not ended, with what there is of it."""
        exchange = self.exchange
        assert self._answer is not None
        self._answer.cancel()
        prompts = exchange.prompts.get(exchange.served.name) or ()
        for index in range(count_of(exchange.asked)):
            if index in self._usages:
                continue
            place = index // exchange.asked.n
            # Of an upstream's prompts only the sum is known, which the first one stands for.
            length = len(prompts[place].tokens) if prompts else exchange.prompt_tokens if place == 0 else 0
            usage = Usage(prompt_tokens=length, output_tokens=self._tokens.get(index, 0))
            if index == 0:
                usage = summed((*(charge.usage for charge in self._tried()), usage))
            self._usages[index] = usage
            take(Piece(index, finish="length", usage=usage))
        exchange.notes["cut"] = exchange.cut

    def _tried(self) -> list[Charge]:
        """What was computed before the answer and is paid for, too."""
        made = self._made
        charges = made.charges if isinstance(made, Composed) else []
        return [charge for charge in charges if charge.charged and charge.role == "first try"]

    async def choices(self) -> list[Choice]:
        """The whole of it."""
        found = {index: Choice(index) for index in range(count_of(self.exchange.asked))}

        def add(piece: Piece) -> bool:
            if isinstance(piece, Restart):
                found[piece.index] = Choice(piece.index)
            else:
                found[piece.index].add(piece)
            return True

        await self.run(add)
        return [found[index] for index in sorted(found)]

    def headers(self) -> dict[str, str]:
        """What a client is told of the stages, beside the answer. Final where the answer is whole."""
        found = {**self.exchange.headers, **self._telling.headers()}
        if self._shaped:
            found["x-millrace-shaped"] = header_value(self._shaped)
        made = self._made
        decisions = (*self._plan.decisions, *(decisions_of(made) if made is not None else ()))
        if decisions:
            found |= headers_of(decisions)
        return found

    @property
    def _made(self) -> Answers | None:
        """What generates the answer, for this one alone or for several."""
        return self._own if (shared := self._shared) is None else shared.answers

    def cancel(self) -> None:
        """The client is gone: what runs for it alone ends by the engine's next step."""
        self.gone = True
        if self._answer is not None:
            self._answer.cancel()
        if self._waits is not None:
            self._waits.cancel()

    # Settle

    def settle(self, error: ApiError | None = None) -> None:
        """Once, however it ended."""
        if self._settled:
            return
        self._settled = True
        exchange = self.exchange
        answer, own = self._answer, self._own
        if self._wait is not None:
            self._wait.over()
        facts = None
        if answer is not None:
            answer.cancel()
            facts = answer.facts()  # who leaves a shared generation before its end no longer pays for it
            self._free = not facts.pays
            if exchange.by == "shared" and facts.pays:
                exchange.by = ""  # who began it has left, and it became this one's
        if own is not None:
            own.settle(error)
        shared = self._shared
        if shared is not None and not self._free:
            shared.answers.settle(error)  # it has ended, or nobody is left who wants it
        whole = len(self._usages) == count_of(exchange.asked) if self._looks else bool(exchange.finish)
        if isinstance(answer, Hit) and not self._looks:
            whole = answer.over
            exchange.usage, exchange.finish = answer.usage, answer.finish
            exchange.last = time.monotonic()
            exchange.first = exchange.first or exchange.last
        whole = whole and error is None
        gone = self.gone and not whole
        if exchange.cut:
            exchange.usage = total([self._usages[index] for index in sorted(self._usages)], exchange.asked.n)
            exchange.finish = "length"
        elif shared is not None and not (self._free and exchange.by):
            exchange.usage = Usage() if self._free else shared.exchange.usage
        ended = error.kind if error is not None else "gone" if gone else _ENDED.get(exchange.finish, "finished")
        # Where nothing was done for it, it never was.
        used = exchange.usage.prompt_tokens or exchange.usage.output_tokens or self._out
        self._refused = answer is None or (error is not None and error.kind == "overloaded_error" and not used)
        self._count(whole)
        if self._charged:
            self._charge(facts, ended)
        self._keep(whole)
        metrics.settled(exchange.served.name, exchange, error, gone=gone)
        for step in self._telling.steps:
            metrics.of(metrics.degraded, exchange.surface, step).inc()
        if self._telling.steps:
            exchange.notes["degraded"] = list(self._telling.steps)

    def _count(self, whole: bool) -> None:
        exchange, parts = self.exchange, self._parts
        used = exchange.usage
        if self._reservation is not None:
            if self._refused:
                self._reservation.release_soon()
            elif self._free:  # but for what was let out while it paid
                self._reservation.settle_soon(0, self._reservation.out, whole=False)
            elif isinstance(self._made, Composed):  # what was tried before counts in the ledger alone
                self._reservation.settle_soon(exchange.prompt_tokens, self._out, whole=whole and not exchange.cut)
            else:
                self._reservation.settle_soon(
                    used.prompt_tokens or exchange.prompt_tokens, used.output_tokens, whole=whole and not exchange.cut
                )
        elif whole and not self._free and parts.ledger is not None and used.output_tokens:
            parts.limiter.estimates.learn(
                exchange.caller.tenant,
                exchange.surface,
                used.output_tokens,
                round((exchange.last - exchange.arrival) * 1e6),
            )
        if parts.degrades(exchange.surface) and whole and not exchange.by and exchange.first:
            parts.pressure.answered(
                exchange.served.name,
                exchange.surface,
                tokens=used.output_tokens,
                seconds=exchange.last - exchange.first,
            )

    def _charge(self, facts: Facts | None, ended: str) -> None:
        exchange, parts = self.exchange, self._parts
        assert parts.ledger is not None
        if self._refused:
            parts.ledger.release(exchange.id)
            return
        made = self._made
        instead = self._named if exchange.served.name != self._named else ""
        if exchange.by == "extract":
            parts.charge(exchange.id, Usage(), ended=ended, hit="extract")
        elif self._free and exchange.cut:  # others have it, and one of them pays
            parts.charge(exchange.id, exchange.usage, ended=ended, hit="shared")
        elif self._free:
            saved = facts.saved if facts is not None and exchange.by else Usage()
            parts.charge(exchange.id, saved, ended=ended, hit="exact" if exchange.by == "stale" else exchange.by)
        elif isinstance(made, Composed):
            charges = [charge for charge in made.charges if charge.charged]
            if exchange.cut:  # what the client has of the answer, and not what was made of it
                tried = self._tried()
                answer = _without(exchange.usage, summed(charge.usage for charge in tried))
                charges = [*tried, Charge(exchange.served.name, answer, "answer")]
            self._charge_each(charges or [Charge(exchange.served.name, Usage(), "answer")], ended, instead)
        else:
            parts.charge(exchange.id, exchange.usage, ended=ended, variant=exchange.served.name, instead_of=instead)

    def _charge_each(self, charges: list[Charge], ended: str, instead: str) -> None:
        """The last is the answer; what was computed before it (a cascade's first try) is a part of the same request."""
        for place, charge in enumerate(charges):
            last = place == len(charges) - 1
            id = self.exchange.id if last else f"{self.exchange.id}.{place}"
            self._parts.charge(
                id,
                charge.usage,
                ended=ended,
                variant=charge.variant,
                instead_of=instead if last and charge.variant != instead else "",
                entry=None if last else self._entry(id=id, variant=charge.variant, counted=False),
            )

    def _keep(self, whole: bool) -> None:
        recall = self._recall
        if recall is None or recall.outcome == "hit" or not whole or self.exchange.by:
            return
        if not self.exchange.cut and _by_plan(self.exchange, self._plan):
            choice = Choice(0)
            for piece in self._said:
                choice.add(piece)
            if (answer := answer_of([choice])) is not None:
                self._parts.keep_later(self.exchange, recall, answer)


def _by_plan(exchange: Exchange, plan: Plan) -> bool:
    """Whether it was answered by whom it was meant for, and by nobody who stood in."""
    return exchange.served.name in (plan.variant, plan.small)


def _without(usage: Usage, other: Usage) -> Usage:
    """The tokens that are left."""
    return Usage(
        prompt_tokens=max(0, usage.prompt_tokens - other.prompt_tokens),
        output_tokens=max(0, usage.output_tokens - other.output_tokens),
        cached_tokens=max(0, usage.cached_tokens - other.cached_tokens),
    )


class Shared:
    """A generation that several clients may have: it settles itself when the last of them has left, or at its end."""

    def __init__(self, answers: Answers, plan: Plan) -> None:
        self.answers = answers
        self._plan = plan
        self._begun = False
        self._cancelled = False

    @property
    def exchange(self) -> Exchange:
        """Its own, of nobody in particular."""
        return self.answers.exchange

    def keeps(self) -> bool:
        return _by_plan(self.exchange, self._plan)

    async def run(self, take: Take) -> bool:
        answers = self.answers
        if self._cancelled:
            return True
        error: ApiError | None = None
        try:
            if not self._begun:
                self._begun = True
                await answers.begin()
                if self._cancelled:
                    answers.cancel()
            return await answers.run(take)
        except ApiError as caught:
            error = caught
            raise
        finally:
            answers.settle(error)

    def cancel(self) -> None:
        self._cancelled = True
        self.answers.cancel()


__all__ = ["Shared", "Source", "Way"]
