"""A decoding loop without a scheduler, for tests of what the loop is made of: drafts, grammars and output text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine.executors.batch_builder import BatchBuilder
from headrace.engine.executors.executor import Executor
from headrace.engine.grammar.constraints import GrammarCompiler, GrammarState
from headrace.engine.interface.output_text import OutputText
from headrace.engine.interface.request import FinishReason, GenerationRequest, SequenceState, open_sequence
from headrace.engine.interface.sampling import SampledToken
from headrace.engine.scheduling.step_plan import Share, StepPlan
from headrace.engine.speculation.draft_model import DraftModelDrafter
from headrace.engine.speculation.drafters import sample_rows, verify
from headrace.engine.speculation.speculator import Speculator
from headrace.models.text.tokenizer import Tokenizer


@dataclass
class Running:
    sequence: SequenceState
    output: OutputText
    grammar: GrammarState | None
    text: str = ""
    chosen: list[SampledToken] = field(default_factory=list[SampledToken])
    forced: int = 0


def decode(
    executor: Executor,
    tokenizer: Tokenizer,
    requests: Sequence[GenerationRequest],
    *,
    speculator: Speculator | None = None,
    grammars: GrammarCompiler | None = None,
    force: bool = True,
) -> list[Running]:
    """Every sequence of every request to its end, all in step; a prompt is computed in one piece."""
    capacity = executor.capacity
    builder = BatchBuilder(capacity, executor.spec.vocab_size, executor.spec.hidden_size, 8)
    everything = [start(request, index, tokenizer, grammars) for request in requests for index in range(request.n)]
    each = min(capacity.blocks // len(everything), capacity.context // capacity.block_tokens)
    for place, running in enumerate(everything):
        running.sequence.blocks = list(range(place * each, (place + 1) * each))
    rows = [builder.row() for _ in everything]
    states = {id(running.sequence): running.grammar for running in everything}

    def fits(sequence: SequenceState, drafts: list[int]) -> int:
        state = states[id(sequence)]
        return len(drafts) if state is None else state.fitting(drafts)

    if speculator is not None and grammars is not None and isinstance(speculator.drafter, DraftModelDrafter):
        speculator.drafter.constrain = lambda sequence, drafts: (
            None if (state := states[id(sequence)]) is None else grammars.mask_after(state, drafts)
        )
    while current := [place for place, running in enumerate(everything) if running.sequence.finish is None]:
        sequences = [everything[place].sequence for place in current]
        if speculator is not None:
            rows_now = sum(sequence.pending for sequence in sequences)
            speculator.draft(sequences, rows=rows_now, room=64, step_seconds=lambda rows: 1.0, fits=fits)
        shares = [
            Share(sequence, sequence.pending + len(sequence.drafted), 1 + len(sequence.drafted))
            for sequence in sequences
        ]
        ticket = executor.launch(builder.build(StepPlan(shares, [], 0.0), [rows[place] for place in current]))
        constrained = [
            (state, everything[place].sequence.drafted) for place in current if (state := everything[place].grammar)
        ]
        masks = iter(grammars.launch(constrained).collect() if grammars and constrained else [])
        wishes = [
            sample_rows(
                everything[place].sequence,
                everything[place].sequence.drafted,
                next(masks) if everything[place].grammar else None,
            )
            for place in current
        ]
        logits = executor.collect(ticket).values
        # Rows past the end of a grammar are not sampled.
        kept: list[int] = []
        start_row = 0
        for share, wish in zip(shares, wishes, strict=True):
            kept += range(start_row, start_row + len(wish))
            start_row += share.wanted
        laid_out = executor.lay_out([row for wish in wishes for row in wish])
        tokens = executor.choose(logits[kept], laid_out)
        first = 0
        for place, wish in zip(current, wishes, strict=True):
            mine = tokens[first : first + len(wish)]
            running = everything[place]
            request = running.sequence.request
            most = request.max_tokens - running.sequence.output_count
            count = verify(running.sequence.drafted, mine, stop_ids=request.stop_ids, most=most)
            assert count > 0, running.grammar and running.grammar.error
            chosen = [laid_out.chosen(first + row) for row in range(count)]
            settle(running, mine[:count], chosen, speculator, force=force)
            first += len(wish)
    return everything


def start(request: GenerationRequest, index: int, tokenizer: Tokenizer, grammars: GrammarCompiler | None) -> Running:
    output = OutputText(tokenizer, stop=request.stop, stop_ids=request.stop_ids, min_tokens=request.min_tokens)
    grammar = grammars.compile(request.grammar) if grammars and request.grammar else None
    return Running(open_sequence(request, index), output, grammar)


def settle(
    running: Running, tokens: list[int], chosen: list[SampledToken], speculator: Speculator | None, *, force: bool
) -> None:
    sequence = running.sequence
    request = sequence.request
    if speculator is not None:
        held = sum(token == draft for token, draft in zip(tokens, sequence.drafted, strict=False))
        speculator.observe(sequence, len(sequence.drafted), held)
    forced: list[int] = []
    grammar = running.grammar
    if grammar is not None:
        tokens = tokens[: grammar.advance(tokens)]
        if force and request.sampling.logprobs is None and tokens[-1] not in request.stop_ids:
            forced = grammar.forced(request.max_tokens - sequence.output_count - len(tokens))
    before = running.output.count
    running.text += running.output.push([*tokens, *forced])
    taken = running.output.count - before
    running.forced += max(0, taken - len(tokens))
    sequence.computed = len(sequence.tokens) + min(taken, len(tokens)) - 1
    running.chosen += chosen[:taken]
    sequence.append([*tokens, *forced][:taken])
    sequence.drafted = []
    if running.output.ended is not None or (grammar is not None and grammar.finished):
        sequence.finish = FinishReason.STOP
    elif sequence.output_count >= request.max_tokens:
        sequence.finish = FinishReason.LENGTH
    if sequence.finish is not None:
        running.text += running.output.finish()
        if speculator is not None:
            speculator.forget(sequence)
