"""The shares of one step: drafts make way for an image, and prompts keep their rows."""

from __future__ import annotations

import pytest

from headrace.engine.interface.image_rows import ImageRows
from headrace.engine.interface.request import GenerationRequest, open_sequence
from headrace.engine.scheduling.step_builder import StepBuilder
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.engine.scheduling.step_time import StepTimeModel
from headrace.engine.scheduling.tenant_service import TenantAccount
from headrace.engine.scheduling.waiting_queue import SequenceJob
from headrace.surfaces import SURFACES

LIMITS = SchedulerLimits(max_rows=37, max_sequences=8, whole_images=True)


def job(request: GenerationRequest) -> SequenceJob:
    return SequenceJob(0, open_sequence(request, 0, 0), SURFACES["chat"], TenantAccount("t"))


def drafted() -> SequenceJob:
    """A sequence of 24 tokens, 4 of them computed, for which the engine drafted 6."""
    found = job(GenerationRequest(id="drafted", prompt=tuple(range(4)), max_tokens=50))
    found.sequence.append(list(range(20)))
    found.sequence.computed = 4
    found.sequence.drafted = [1, 2, 3, 4, 5, 6]
    return found


def image() -> SequenceJob:
    rows = ImageRows(start=0, count=36, digest=b"x", data=b"")
    return job(GenerationRequest(id="image", prompt=tuple(range(38)), images=(rows,), max_tokens=4))


@pytest.mark.parametrize("seconds", [0.0, 9.0])
def test_a_prompt_keeps_its_rows_whatever_was_drafted_for_it(seconds: float) -> None:
    step = StepBuilder(LIMITS, StepTimeModel())
    prompt = drafted()
    step.give(prompt, seconds, least=2)
    step.give(image(), 9.0)
    share = step.shares[0]
    ends = share.count == prompt.sequence.pending
    assert (share.count, share.wanted) == ((20, 1) if seconds else (2, 0))
    assert ends == bool(share.wanted)
    assert prompt.sequence.drafted == [1, 2, 3, 4, 5, 6]
    assert step.rows == sum(each.count for each in step.shares) <= LIMITS.max_rows


def test_drafts_of_a_stream_make_way_for_an_image() -> None:
    step = StepBuilder(LIMITS, StepTimeModel())
    stream = drafted()
    stream.sequence.computed = 23
    step.decode([stream])
    assert (step.shares[0].count, step.shares[0].wanted) == (7, 7)
    step.give(image(), 9.0)
    assert [(each.count, each.wanted) for each in step.shares] == [(1, 1), (36, 0)]
    assert stream.sequence.drafted == []
