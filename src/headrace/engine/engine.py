"""The engine: a plan, run, settle loop over one executor. One thread owns an engine; it knows no sockets or processes.

The host's work hides behind the device's:

    begin    plan, build the batch, launch                          between two steps
    prepare  grammar masks, rows for the sampler                  }
    deliver  text and outputs of the previous step                } while the step runs
    finish   collect, choose tokens, verify drafts, settle          between two steps

`step` does these one after the other; `overlapped_step` overlaps them as above. A worker also serves its sockets while
it waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import msgspec

from headrace.engine.executors.adapter_table import AdapterTable
from headrace.engine.executors.batch_builder import BatchBuilder, kept_rows
from headrace.engine.executors.executor import Executor, SampleBatch, StepTicket
from headrace.engine.interface.image_rows import check_images
from headrace.engine.interface.output_text import OutputText
from headrace.engine.interface.outputs import SequenceOutput
from headrace.engine.interface.request import FinishReason, GenerationRequest, SequenceState
from headrace.engine.interface.sampling import MOST_LOGPROBS, SampleRow
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.kv_tiers import KvTiers
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.step_plan import AdmissionDecision, SequenceEvent, Share, ShareOutcome, StepPlan
from headrace.engine.scheduling.step_time import StepTimeModel
from headrace.engine.sequence_progress import SequenceProgress
from headrace.engine.speculation.draft_model import DraftModelDrafter
from headrace.engine.speculation.head_drafter import Floats, HeadDrafter
from headrace.engine.speculation.layer_drafter import LayerDrafter
from headrace.engine.speculation.speculator import Speculator
from headrace.errors import HeadraceError, RequestError
from headrace.models.step_work import StepWork
from headrace.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.engine.grammar.constraints import GrammarCompiler, GrammarState, Mask, Masks

log = logging.getLogger(__name__)

MOST_STOP_IDS: Final = 1024
_HOST_SHARE: Final = 0.05  # weight of the newest step in the running mean of the host's time
MOST_PROMPT_LOGPROBS: Final = 1_000_000  # per prompt; each takes about ten bytes on the wire


def _unchanged(vector: Any) -> Any:
    return vector


class _Step(msgspec.Struct):
    """The step under way."""

    plan: StepPlan
    ticket: StepTicket
    running: list[SequenceProgress]  # by share
    masks: Masks | None  # of the sequences in `masked`, in order
    launched: float
    masked: set[int]  # sequences whose grammar constrains this step, by share
    rows: SampleBatch | None = None
    mask_counts: dict[int, int] = {}  # by share


class EngineTiming(msgspec.Struct):
    """Seconds that the loop has spent so far, by activity."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0  # generated
    device: float = 0.0  # from launch to result
    choosing: float = 0.0  # in the sampler
    bytes_read: float = 0.0  # that the steps had to read at least
    operations: float = 0.0  # that they had to do at least
    between: float = 0.0  # host time from a step's result to the next launch, without choosing
    beside: float = 0.0  # host time while a step ran


_CORE_STEPS: Final = 64  # steps between two readings of the core's stages


@runtime_checkable
class _Timed(Protocol):
    """An executor that measures its stages, and knows the least work of a step."""

    @property
    def work(self) -> StepWork: ...

    def stage_seconds(self) -> dict[str, float]: ...


class Engine:
    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        blocks: BlockManager,
        tokenizer: Tokenizer | None,
        *,
        grammars: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
        tiers: KvTiers | None = None,
        adapters: AdapterTable | None = None,
        step_time: StepTimeModel | None = None,
        sequences: int = 64,
        clock: Callable[[], float] = time.monotonic,
        checks: bool = False,
    ) -> None:
        """`tokenizer` is None for a model that generates no text. `sequences` is how many usually run at once."""
        self.executor = executor
        self.scheduler = scheduler
        self.blocks = blocks
        self.tokenizer = tokenizer
        self.timing = EngineTiming()
        self._tiers = tiers
        self.adapters = adapters
        self._spec = executor.spec
        self._after_pooling = executor.after_pooling if self._spec.pooled_layers else _unchanged
        self._grammars = grammars
        self.speculator: Speculator | None = None
        self._step_time = step_time or StepTimeModel()
        self._clock = clock
        self._checks = checks
        capacity = executor.capacity
        self._builder = BatchBuilder(
            capacity,
            self._spec.vocab_size,
            self._spec.hidden_size,
            sequences,
            feature_size=self._spec.feature_size,
            spans=self._spec.image_span > 0,
            places=self._spec.has_places,
        )
        self._progress: dict[int, SequenceProgress] = {}  # by id() of the sequence, which the progress keeps alive
        self._step: _Step | None = None
        self._decoding: list[SequenceState] = []  # sequences of the last step that continue
        self._events: list[SequenceEvent] = []  # not delivered yet
        self._work = executor.work if isinstance(executor, _Timed) else None
        self._core: dict[str, float] = {}  # seconds by stage of the core, as last read
        self._results_at = 0.0  # when the last step's results arrived; 0 after a pause
        self._host = 0.0  # running mean of host seconds between two steps
        self._heads: HeadDrafter | None = None
        self.draft_with(speculator)

    def draft_with(self, speculator: Speculator | None) -> None:
        """Draft with this from the next step on. No request may run."""
        self.speculator = speculator
        drafter = None if speculator is None else speculator.drafter
        if isinstance(drafter, (DraftModelDrafter, LayerDrafter)):
            drafter.constrain = self._mask_after
        self._heads = drafter if isinstance(drafter, HeadDrafter) else None
        self._builder.keeps_states = self._heads is not None
        self._builder.reads = () if self._heads is None else self._heads.reads
        self._builder.keeps_prompts = self._heads is not None and self._heads.reads_prompts

    # Requests

    def submit(
        self, request: GenerationRequest, *, output: tuple[int, ...] = (), grammar: GrammarState | None = None
    ) -> AdmissionDecision:
        """Queue a request, or return why it is rejected. Raise RequestError if it can never be served.

        `output` holds tokens that another engine generated and delivered: text, penalties, grammar and sampling
        continue after them. `grammar` is the compiled grammar; without it, this call compiles the grammar and waits.
        """
        self._check(request, output)
        if request.grammar is not None:
            grammar = self._grammar(request, output, grammar)
        texts = [self._text(request, output) for _ in range(request.n)]
        now = self._clock()
        self._hold_adapter(request)
        admission = self.scheduler.admit(request, now, output=output)
        if not admission.accepted:
            self._release_adapter(request, request.n)
            if admission.parameter is not None:
                raise RequestError(admission.why, parameter=admission.parameter)
            return admission
        for sequence, text in zip(admission.sequences, texts, strict=True):
            state = None if grammar is None else grammar.clone()
            self._progress[id(sequence)] = SequenceProgress(sequence, text, state, self._builder.row(), now)
        return admission

    def _hold_adapter(self, request: GenerationRequest) -> None:
        """Keep the request's adapter in memory until each of its sequences has ended."""
        ref = request.adapter
        if ref is not None and (self.adapters is None or not self.adapters.hold(ref, request.n)):
            raise RequestError(f"The adapter '{ref.name}' is not loaded.", parameter="model")

    def _release_adapter(self, request: GenerationRequest, sequences: int = 1) -> None:
        if request.adapter is not None and self.adapters is not None:
            self.adapters.release(request.adapter, sequences)

    def cancel(self, request_id: str) -> None:
        """End the request's sequences. Those in the step under way end when it is settled."""
        self._events += self.scheduler.cancel(request_id, self._clock())

    @property
    def grammars(self) -> GrammarCompiler:
        if self._grammars is None:
            if self.tokenizer is None:
                raise RequestError("This model generates no text, so it cannot follow a grammar.", parameter="grammar")
            # imported on demand: many workers never need it
            from headrace.engine.grammar.constraints import GrammarCompiler

            self._grammars = GrammarCompiler(self.tokenizer)
        return self._grammars

    def _grammar(
        self, request: GenerationRequest, output: tuple[int, ...], compiled: GrammarState | None
    ) -> GrammarState:
        """Return the grammar state after the tokens in `output`."""
        assert request.grammar is not None
        state = self.grammars.compile(request.grammar, salt=request.salt) if compiled is None else compiled.clone()
        try:
            state.advance(output)
        except HeadraceError as error:
            raise RequestError(str(error), parameter="grammar") from None
        return state

    def _text(self, request: GenerationRequest, output: tuple[int, ...]) -> OutputText | None:
        if self.tokenizer is None or request.kind != "generate":
            return None
        text = OutputText(
            self.tokenizer,
            stop=request.stop,
            stop_ids=request.stop_ids,
            min_tokens=request.min_tokens,
            skip_special_tokens=request.skip_special_tokens,
        )
        text.push(output)
        return text

    def _check(self, request: GenerationRequest, output: tuple[int, ...]) -> None:
        """Raise RequestError for errors that the scheduler cannot see, because it knows no vocabulary and no text."""
        vocab = self._spec.vocab_size
        for name, tokens in (("prompt", request.prompt), ("output", output)):
            if tokens and (min(tokens) < 0 or max(tokens) >= vocab):
                raise RequestError(f"'{name}' has a token outside the vocabulary of {vocab} tokens.", parameter=name)
        if request.kind != "embed" and self._spec.kind != "decoder":
            raise RequestError(
                f"{self._spec.architecture} is an {self._spec.kind}: it makes embeddings, not text."
                if self._spec.kind == "encoder"
                else f"{self._spec.architecture} is a reranker: it scores pairs of texts and generates none.",
                parameter="model",
            )
        if request.images:
            check_images(request.images, len(request.prompt), self._spec.feature_size)
            if self._spec.image_span and request.first_result < len(request.prompt):
                raise RequestError(
                    "This model computes an image in one piece and gives no results of prompts with images. Remove "
                    "the images or 'prompt_logprobs'.",
                    parameter="prompt_logprobs",
                )
            if any(image.count > self._spec.image_span > 0 for image in request.images):
                raise RequestError(
                    f"An image has more than the model's {self._spec.image_span} tokens.", parameter="images"
                )
        if not 1 <= request.n <= self.scheduler.limits.max_sequences:
            most = self.scheduler.limits.max_sequences
            raise RequestError(f"'n' must be 1 to {most}, not {request.n}.", parameter="n")
        if len(request.stop_ids) > MOST_STOP_IDS or any(not 0 <= token < vocab for token in request.stop_ids):
            raise RequestError(
                f"'stop_token_ids' must be at most {MOST_STOP_IDS} tokens of the vocabulary.",
                parameter="stop_token_ids",
            )
        if request.prompt_logprobs is not None and not 0 <= request.prompt_logprobs <= min(MOST_LOGPROBS, vocab):
            raise RequestError(f"'prompt_logprobs' must be 0 to {MOST_LOGPROBS}.", parameter="prompt_logprobs")
        top = request.sampling.logprobs if request.kind == "score" else request.prompt_logprobs
        if top is not None and top * len(request.prompt) > MOST_PROMPT_LOGPROBS:
            raise RequestError(
                f"{top} log-probabilities for each of {len(request.prompt)} tokens of the prompt are more than "
                f"{MOST_PROMPT_LOGPROBS}",
                parameter="prompt_logprobs",
            )
        if request.stop and self.tokenizer is None:
            raise RequestError("This model generates no text, so it takes no stop strings.", parameter="stop")
        request.sampling.check(vocab)

    # The loop

    def step(self) -> list[SequenceOutput]:
        """Run one step and return its outputs."""
        if self.begin() is not None:
            self.finish()
        return self.deliver()

    def overlapped_step(self) -> list[SequenceOutput]:
        """Run one step and return the outputs of the previous one, built meanwhile. After the last step, return what is
        left."""
        if self.begin() is None:
            return self.deliver()
        outputs = self.deliver()
        self.finish()
        return outputs

    @property
    def idle(self) -> bool:
        """True if nothing runs, waits or is to be delivered."""
        return self._step is None and not self._events and self.scheduler.idle

    @property
    def ticket(self) -> StepTicket | None:
        """The step under way."""
        return None if self._step is None else self._step.ticket

    @property
    def busy(self) -> float:
        """Seconds that the step under way has run; 0 if there is none."""
        return 0.0 if self._step is None else self._clock() - self._step.launched

    def gather(self) -> float:
        """Return the seconds that the next step should wait for more requests to share it."""
        return self.scheduler.gather(self._clock())

    def begin(self) -> StepTicket | None:
        """Plan and launch a step. Return None if there is nothing to compute."""
        assert self._step is None, "a step is under way"
        now = self._clock()
        self._events += self.scheduler.expire(now)
        if self.speculator is not None and self._decoding:
            # Some may have ended since the last step, by a cancel or a deadline.
            decoding = [sequence for sequence in self._decoding if sequence.finish is None]
            self._decoding = []
            if decoding:
                self._draft(self.speculator, decoding)
        plan = self.scheduler.plan(now)
        if self._tiers is not None:
            self._tiers.save_evicted()  # before the step writes into their blocks
        if plan is None:
            self._results_at = 0.0
            return None
        running = [self._progress[id(share.sequence)] for share in plan.shares]
        batch = self._builder.build(plan, [progress.block_row for progress in running])
        launched = self._clock()
        ticket = self.executor.launch(batch)
        step = self._step = _Step(plan, ticket, running, None, launched, set())
        if self._results_at:
            between = launched - self._results_at
            self.timing.between += between
            self._host += _HOST_SHARE * (between - self._host)
        for progress in running:
            if progress.started_at is None:
                progress.started_at = launched
        if not plan.hidden:
            work: list[tuple[GrammarState, list[int]]] = []
            for place, (share, progress) in enumerate(zip(plan.shares, running, strict=True)):
                grammar = progress.grammar
                if grammar is not None and share.wanted:
                    drafts = share.sequence.drafted[: share.wanted - 1]
                    if grammar.constrains(drafts):
                        work.append((grammar, drafts))
                        step.masked.add(place)
            if work:
                step.masks = self.grammars.launch(work)
        return ticket

    def _draft(self, speculator: Speculator, decoding: list[SequenceState]) -> None:
        """Set the draft tokens of the sequences that continue in the next step."""
        rows = len(decoding)
        pairs = sum([len(sequence.tokens) for sequence in decoding])
        each = pairs // rows
        predict = self._step_time.predict

        def step_seconds(count: int) -> float:
            return self._host + predict(count, pairs + (count - rows) * each)

        # If even a certain draft would not pay for its row, skip the drafter.
        if (rows + 1) * step_seconds(rows) <= rows * step_seconds(rows + 1):
            for sequence in decoding:
                sequence.drafted = []
            return
        room = self.executor.capacity.max_rows - rows
        speculator.draft(decoding, rows=rows, room=room, step_seconds=step_seconds, fits=self._fitting)

    def _mask_after(self, sequence: SequenceState, drafts: Sequence[int]) -> Mask | None:
        """Return the mask of tokens that the sequence's grammar allows after the drafts."""
        grammar = self._progress[id(sequence)].grammar
        return None if grammar is None else self.grammars.mask_after(grammar, drafts)

    def _fitting(self, sequence: SequenceState, drafts: list[int]) -> int:
        """Return how many of the drafts the sequence's grammar accepts."""
        grammar = self._progress[id(sequence)].grammar
        return len(drafts) if grammar is None else grammar.fitting(drafts)

    def prepare(self) -> None:
        """Build the sampler's rows, with the grammar masks that were computed meanwhile."""
        step = self._step
        if self._tiers is not None and step is not None:
            self._tiers.work()
        if step is None or step.plan.hidden or step.rows is not None:
            return
        began = self._clock()
        masks = iter(step.masks.collect() if step.masks is not None else ())
        rows: list[SampleRow] = []
        for place, (share, progress) in enumerate(zip(step.plan.shares, step.running, strict=True)):
            if not share.wanted:
                continue
            own = None
            if place in step.masked:
                own = next(masks)
                step.mask_counts[place] = len(own)
            rows += progress.rows(share, own)
        step.rows = self.executor.lay_out(rows)
        self.timing.beside += self._clock() - began

    def deliver(self) -> list[SequenceOutput]:
        """Return the outputs of the settled steps: tokens, text, endings."""
        events, self._events = self._events, []
        if not events:
            return []
        now = self._clock()
        outputs: list[SequenceOutput] = []
        for event in events:
            sequence = event.sequence
            progress = self._progress.get(id(sequence))
            if progress is None:
                continue
            if event.tokens and not progress.first_at:
                progress.first_at = now
                progress.first_step = progress.steps
            outputs.append(progress.output(event, self._spec, now, self._after_pooling))
            if event.finish is not None:
                del self._progress[id(sequence)]
                self._release_adapter(sequence.request)
                if self.speculator is not None:
                    self.speculator.forget(sequence)
        if self._step is not None:
            self.timing.beside += self._clock() - now
        return outputs

    def finish(self) -> None:
        """Wait for the step, choose its tokens and settle it."""
        step = self._step
        assert step is not None, "no step is under way"
        self.prepare()
        plan = step.plan
        try:
            result = self.executor.collect(step.ticket)
            done = self._clock()
            if plan.hidden:
                outcomes = self._pooled(step, result.values)
            else:
                assert step.rows is not None
                rows = step.rows
                tokens = self.executor.choose(result.values, rows, result.peaks) if rows.count else []
                self.timing.choosing += self._clock() - done
                done = self._clock()
                outcomes = self._outcomes(step, tokens, step.rows, result.final_states)
            seconds = done - step.launched
        except (ValueError, RuntimeError, MemoryError, OSError, HeadraceError) as error:
            # Only the sequences of this step fail; all others continue.
            log.exception("a step of %d rows failed", plan.rows)
            done, seconds = self._clock(), 0.0
            why = f"the step failed: {error}"
            outcomes = [ShareOutcome([], FinishReason.FAILED, why) for _ in plan.shares]
        for share, outcome in zip(plan.shares, outcomes, strict=True):
            if outcome.finish is FinishReason.FAILED:
                share.count = 0  # must not be found in the cache: wrong, or not computed
        self._step = None
        timing = self.timing
        timing.steps += 1
        if timing.steps % _CORE_STEPS == 1 and isinstance(self.executor, _Timed):
            self._core = self.executor.stage_seconds()  # no step runs now, so it does not wait
        timing.rows += plan.rows
        timing.device += seconds
        if self._work is not None and seconds:
            tokens_read = sum([share.sequence.computed + share.count for share in plan.shares])
            timing.bytes_read += self._work.bytes_read(tokens_read)
            timing.operations += self._work.operations(
                plan.rows, sum([share.wanted for share in plan.shares]), plan.pairs
            )
        self._results_at = done
        events = self.scheduler.settle(plan, outcomes, self._clock(), seconds)
        self._events += events
        timing.tokens += sum([len(event.tokens) for event in events])
        if self.speculator is not None:
            self._decoding = [event.sequence for event in events if event.tokens and event.finish is None]

    def _outcomes(self, step: _Step, tokens: list[int], rows: SampleBatch, states: Floats | None) -> list[ShareOutcome]:
        outcomes: list[ShareOutcome] = []
        at = state_at = 0
        speculator = self.speculator
        keeps_prompts = self._builder.keeps_prompts
        for place, share in enumerate(step.plan.shares):
            progress = step.running[place]
            progress.steps += 1
            state_rows = kept_rows(share) if keeps_prompts else share.wanted
            state_at += state_rows
            if not share.wanted:
                outcomes.append(ShareOutcome())
                if states is not None and state_rows:
                    self._hand_over(share, states[state_at - state_rows : state_at], 0)
                continue
            before = progress.accepted
            outcome = progress.outcome(share, tokens, at, rows, step.mask_counts.get(place))
            outcomes.append(outcome)
            at += share.wanted
            if states is not None and outcome.accepted and outcome.finish is None:
                self._hand_over(share, states[state_at - state_rows : state_at], 1 + progress.accepted - before)
            if speculator is not None and share.sequence.drafted and share.wanted > 1:
                speculator.observe(share.sequence, share.wanted - 1, progress.accepted - before)
        return outcomes

    def _hand_over(self, share: Share, states: Floats, verified: int) -> None:
        """Give the drafter the hidden states of the tokens that are right: those of the prompt, and those whose results
        were accepted. `states` are the last of the share's; without results, all of them are right."""
        sequence = share.sequence
        if self._heads is None or not sequence.request.speculate:
            return
        end = sequence.computed + share.count
        first = end - len(states)
        if not verified:
            self._heads.read_states(sequence, first, states)
            return
        newest = len(sequence.tokens) - 1  # the token before the accepted ones
        first = first if self._heads.reads_prompts else newest
        start = len(states) - (end - first)
        self._heads.read_states(sequence, first, states[start : start + newest - first + verified])

    def _pooled(self, step: _Step, values: Any) -> list[ShareOutcome]:
        outcomes: list[ShareOutcome] = []
        at = 0
        for share, progress in zip(step.plan.shares, step.running, strict=True):
            outcomes.append(progress.pool_states(share, values[at : at + share.wanted], self._spec))
            at += share.wanted
        return outcomes

    # Statistics and shutdown

    def check(self) -> None:
        """Check the block accounting if the variant asks for it. Call it when the engine is idle."""
        if self._checks:
            self.blocks.check()

    def rest(self) -> bool:
        """Do a little of what can wait, when the engine is idle. Return whether there is more."""
        return self._tiers is not None and self.idle and self._tiers.rest()

    def drain(self) -> None:
        """Admit no more requests."""
        self.scheduler.drain()

    def stats(self) -> dict[str, Any]:
        timing = self.timing
        return {
            "steps": timing.steps,
            "rows": timing.rows,
            "tokens": timing.tokens,
            "device_seconds": timing.device,
            "bytes_read": round(timing.bytes_read),
            "operations": round(timing.operations),
            "choosing_seconds": timing.choosing,
            "between_seconds": timing.between,
            "beside_seconds": timing.beside,
            "scheduler": self.scheduler.stats(),
            "blocks": self.blocks.stats(),
            "contiguous_tokens": self.scheduler.contiguous_tokens,
            **({"capacity": self.scheduler.capacity(self._clock())} if self._spec.kind == "decoder" else {}),
            **({"tiers": self._tiers.stats()} if self._tiers is not None else {}),
            **({"adapters": self.adapters.stats()} if self.adapters is not None else {}),
            **({"core": self._core} if self._core else {}),
        }

    def close(self) -> None:
        if self._step is not None:
            self.executor.collect(self._step.ticket)
            self._step = None
        if self._tiers is not None:
            self._tiers.close()
        if self._grammars is not None:
            self._grammars.close()
        drafter = None if self.speculator is None else self.speculator.drafter
        if isinstance(drafter, (DraftModelDrafter, HeadDrafter)):
            drafter.close()
        self.executor.close()
