"""The scheduler against an exact machine: what a step holds, in which order, and what becomes of its outcomes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec.structs import replace

from headrace.engine.interface.request import FinishReason
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits, Share, ShareOutcome
from headrace.surfaces import SURFACES
from tests.support.scheduler_machine import Machine, exact, prompt


@pytest.fixture
def machine() -> Machine:
    return Machine(BlockManager(1024))


# A step's budget


def test_a_prompt_is_computed_once_and_an_answer_token_by_token(machine: Machine) -> None:
    sequence = machine.must("a", 100, max_tokens=5)
    machine.run()
    assert machine.rows[sequence] == 100 + 4  # the last token is never computed
    assert sequence.output == [7] * 5
    assert machine.finish(sequence) is FinishReason.LENGTH
    assert [shares[0][1:] for shares in machine.shares] == [(100, 1), (1, 1), (1, 1), (1, 1), (1, 1)]


def test_every_stream_gets_a_token_in_every_step(machine: Machine) -> None:
    chats = [machine.must(f"chat {number}", 50, max_tokens=200) for number in range(8)]
    machine.run(steps=12)
    for number in range(3):
        machine.must(f"long {number}", 4000, surface="agent")
    for _ in range(100):
        plan = machine.step()
        assert plan is not None
        assert {share.sequence for share in plan.shares} >= set(chats)


def test_long_prompts_stretch_the_streams_steps_only_a_little(machine: Machine) -> None:
    chats = [machine.must(f"chat {number}", 50, max_tokens=400) for number in range(8)]
    machine.run(steps=60)
    calm = max(gap for chat in chats for gap in machine.gaps(chat)[-40:])
    before = len(machine.times[chats[0]])
    long = [machine.must(f"long {number}", 4000, surface="agent") for number in range(3)]
    machine.run(steps=300)
    assert all(sequence.computed > 1000 for sequence in long[:1])
    disturbed = max(gap for chat in chats for gap in machine.gaps(chat)[before:])
    assert calm < disturbed <= 1.8 * calm


def test_short_prompts_may_use_the_whole_objective_and_no_more(machine: Machine) -> None:
    chats = [machine.must(f"chat {number}", 50, max_tokens=400) for number in range(4)]
    machine.run(steps=60)
    for number in range(10):
        machine.must(f"new {number}", 300)
    plan = machine.step()
    assert plan is not None
    bound = machine.policy.pace * SURFACES["chat"].itl
    assert 0.9 * bound < plan.predicted <= bound
    machine.run(steps=30)
    assert max(gap for chat in chats for gap in machine.gaps(chat)[50:]) <= SURFACES["chat"].itl + 1e-9


def test_the_tightest_objective_counts(machine: Machine) -> None:
    machine.must("chat", 50, max_tokens=100)
    machine.must("voice", 50, max_tokens=100, surface="voice")
    machine.run(steps=5)
    machine.must("new", 400)
    plan = machine.step()
    assert plan is not None
    assert plan.predicted <= SURFACES["voice"].itl


def test_a_step_without_streams_lasts_no_longer_than_a_newcomer_may_wait(machine: Machine) -> None:
    machine.must("long", 4000, surface="agent")
    plan = machine.step()
    assert plan is not None
    assert 0.8 * machine.limits.longest_step < plan.predicted <= machine.limits.longest_step


def test_streams_slower_than_their_objective_still_let_prompts_in() -> None:
    machine = Machine(BlockManager(4096), limits=SchedulerLimits(max_sequences=200))
    for number in range(150):
        machine.must(f"chat {number}", 20, max_tokens=300)
    machine.run(steps=60)
    assert exact(150, 0) > SURFACES["chat"].itl
    new = machine.must("new", 100)
    long = machine.must("long", 2000)
    machine.run(steps=40)
    assert machine.ttft(new) < 3.0
    assert long.computed > 400


@pytest.mark.parametrize("late_stretch", [1.0, 4.0])
def test_prompts_that_are_late_share_what_is_too_little_for_both(late_stretch: float) -> None:
    policy = Policy(late_stretch=late_stretch)
    machine = Machine(BlockManager(8192), limits=SchedulerLimits(max_sequences=200), policy=policy)
    chats = [machine.must(f"chat {number}", 20, max_tokens=400) for number in range(60)]
    machine.run(steps=60)
    objective = policy.pace * SURFACES["chat"].itl
    alone = exact(60, 60 * 60)
    assert alone < objective
    new = [machine.must(f"new {number}", 200, max_tokens=2) for number in range(30)]
    before = len(machine.plans)
    machine.run(steps=8)
    in_time = max(plan.predicted for plan in machine.plans[before:])
    machine.run(steps=400)
    longest = max(plan.predicted for plan in machine.plans[before:])
    assert in_time <= max(objective, SURFACES["chat"].stretch * alone) * 1.05
    if late_stretch == 1.0:
        assert longest <= 1.05 * in_time  # the streams alone have become a little slower
        assert max(map(machine.ttft, new)) > 14.0
    else:
        assert 1.2 * in_time < longest <= policy.late_objective * objective
        assert max(map(machine.ttft, new)) < 11.5
    assert all(len(machine.times[chat]) == 400 for chat in chats)


def test_short_prompts_do_not_keep_long_ones_out(machine: Machine) -> None:
    long = machine.must("long", 3000, surface="agent", max_tokens=2)
    for step in range(400):
        for number in range(2):
            machine.send(f"short {step} {number}", 120, max_tokens=1)
        machine.step()
        if machine.times[long]:
            break
    assert machine.times[long]


def test_parts_of_a_prompt_end_with_a_block(machine: Machine) -> None:
    machine.must("first", 41, max_tokens=1)
    long = machine.must("long", 3001, max_tokens=1)
    machine.run()
    counts = [count for shares in machine.shares for sequence, count, _ in shares if sequence is long]
    assert sum(counts) == 3001
    assert len(counts) > 8
    assert all(count % 16 == 0 for count in counts[:-1])


# Prefixes


def test_a_cached_prefix_is_not_computed_again(machine: Machine) -> None:
    shared = prompt(320)
    machine.must("first", (*shared, 1, 2, 3))
    machine.run()
    second = machine.must("second", (*shared, 4, 5, 6), max_tokens=1)
    machine.run()
    assert machine.rows[second] == 3
    assert second.cached == 320


def test_a_burst_that_shares_a_cold_prefix_computes_it_once(machine: Machine) -> None:
    shared = prompt(1600)
    burst = [machine.must(f"{number}", (*shared, *prompt(20, seed=number + 5)), max_tokens=1) for number in range(12)]
    machine.run()
    assert sum(machine.rows.values()) == 1600 + 12 * 20
    assert machine.scheduler.stats().followed == 11
    assert all(machine.finish(sequence) is FinishReason.LENGTH for sequence in burst)


def test_followers_go_on_as_soon_as_their_part_is_there(machine: Machine) -> None:
    shared = prompt(160)
    leader = machine.must("leader", (*shared, *prompt(2500, seed=3)), max_tokens=1)
    machine.step()
    follower = machine.must("follower", (*shared, 1, 2, 3), max_tokens=1)
    machine.run()
    assert machine.times[follower][0] < machine.times[leader][0]
    assert machine.rows[follower] == 3


def test_when_the_one_that_computes_is_cancelled_another_goes_on(machine: Machine) -> None:
    shared = prompt(1600)
    burst = [machine.must(f"{number}", (*shared, *prompt(20, seed=number + 5)), max_tokens=1) for number in range(4)]
    machine.step()
    machine.take(machine.scheduler.cancel("0", machine.now))
    machine.run()
    assert [machine.finish(sequence) for sequence in burst] == [FinishReason.CANCELLED] + [FinishReason.LENGTH] * 3
    # What the first had computed is found again; all in all the prefix is computed once.
    assert sum(machine.rows.values()) == 1600 + 3 * 20


def test_two_tenants_share_nothing(machine: Machine) -> None:
    shared = prompt(800)
    for name in ("a", "b"):
        machine.must(name, shared, tenant=name, salt=name, max_tokens=1)
    machine.run()
    assert sum(machine.rows.values()) == 1600


def test_cached_tokens_are_not_charged(machine: Machine) -> None:
    shared = prompt(3200)
    machine.must("warm", (*shared, 1), tenant="a", salt="a", max_tokens=1)
    machine.run()
    before = machine.scheduler.queue.account("a").charged[0]
    machine.must("again", (*shared, 2), tenant="a", salt="a", max_tokens=1)
    machine.run()
    assert machine.scheduler.queue.account("a").charged[0] - before == 1 + machine.policy.decode_weight


def test_several_answers_to_one_prompt_compute_it_once(machine: Machine) -> None:
    admission = machine.send("a", 200, n=4, max_tokens=3)
    machine.run()
    assert sum(machine.rows.values()) == 200 + 3 * 1 + 4 * 2
    assert [machine.finish(sequence) for sequence in admission.sequences] == [FinishReason.LENGTH] * 4
    assert [sequence.index for sequence in admission.sequences] == [0, 1, 2, 3]


# Order


def test_one_tenants_flood_does_not_delay_anothers_first_token(machine: Machine) -> None:
    for number in range(300):
        machine.send(f"flood {number}", 200, tenant="flood", max_tokens=50)
    machine.run(steps=50)
    quiet = machine.must("quiet", 200, tenant="quiet")
    machine.run(steps=60)
    assert machine.ttft(quiet) < SURFACES["chat"].ttft


def test_background_work_takes_what_is_left_and_gives_way(machine: Machine) -> None:
    batch = [machine.must(f"batch {number}", 300, surface="batch", max_tokens=200) for number in range(30)]
    machine.run(steps=40)
    assert sum(len(machine.times[each]) > 0 for each in batch) == machine.limits.max_sequences
    chats = [machine.must(f"chat {number}", 100, max_tokens=20) for number in range(6)]
    machine.run(steps=60)
    assert all(machine.ttft(chat) < 0.8 for chat in chats)  # 0.6 s are theirs
    machine.run()
    assert {machine.finish(each) for each in batch} == {FinishReason.LENGTH}


def test_background_work_does_not_stand_still_for_ever(machine: Machine) -> None:
    batch = machine.must("batch", 400, surface="batch", max_tokens=4)
    for step in range(3000):
        while machine.send(f"chat {step} {len(machine.times)}", 300, max_tokens=3).accepted:
            if machine.scheduler.stats().waiting > 40:
                break
        machine.step()
        if machine.finish(batch):
            break
    assert machine.finish(batch) is FinishReason.LENGTH
    assert machine.scheduler.stats().waiting > 20


def test_a_higher_priority_goes_first(machine: Machine) -> None:
    machine.must("running", 3000, max_tokens=1)
    machine.step()
    low = [machine.must(f"low {number}", 400, max_tokens=1) for number in range(5)]
    high = machine.must("high", 400, max_tokens=1, priority=2)
    machine.run()
    assert machine.times[high][0] < min(machine.times[each][0] for each in low[1:])


def test_the_one_with_least_slack_goes_first(machine: Machine) -> None:
    machine.must("running", 3000, max_tokens=1)
    machine.step()
    waiting = [
        machine.must(f"{deadline}", 500, max_tokens=2, deadline=machine.now + deadline)
        for deadline in (60.0, 20.0, 40.0, 30.0)
    ]
    machine.run()
    order = sorted(waiting, key=lambda sequence: machine.times[sequence][0])
    assert [sequence.request.id for sequence in order] == ["20.0", "30.0", "40.0", "60.0"]


# Outcomes


def test_drafts_that_hold_are_kept_and_the_others_computed_again(machine: Machine) -> None:
    truth = list(range(100, 140))

    def verify(share: Share) -> ShareOutcome:
        sequence = share.sequence
        if not share.wanted:
            return ShareOutcome()
        following = truth[sequence.output_count :]
        kept = 0
        for draft, true in zip(sequence.drafted, following, strict=False):
            if draft != true:
                break
            kept += 1
        return ShareOutcome(following[: kept + 1])

    machine.answers = verify
    sequence = machine.must("a", 50, max_tokens=40)
    while machine.finish(sequence) is None:
        if sequence.output_count:
            done = sequence.output_count
            sequence.drafted += [*truth[done : done + 3], 1]  # three right, one wrong
        before = sequence.computed
        plan = machine.plan()
        assert plan is not None
        if sequence.output_count:
            drafts = min(4, 40 - sequence.output_count - 1)
            assert [(share.count, share.wanted) for share in plan.shares] == [(1 + drafts, 1 + drafts)]
        machine.settle(plan)
        if machine.finish(sequence) is None:
            assert sequence.computed == len(sequence.tokens) - 1 > before
            assert sequence.drafted == []
    assert sequence.output == truth
    assert len(machine.plans) == 1 + 10


def test_a_stop_id_ends_a_sequence_even_among_drafts(machine: Machine) -> None:
    machine.answers = lambda share: ShareOutcome([5, 9, 6, 6] if share.wanted else [])
    sequence = machine.must("a", 50, max_tokens=40, stop_ids=frozenset({9}))
    machine.run()
    assert sequence.output == [5, 9]
    assert machine.finish(sequence) is FinishReason.STOP


def test_no_more_tokens_are_kept_than_were_asked_for(machine: Machine) -> None:
    machine.answers = lambda share: ShareOutcome([5] * 30 if share.wanted else [])
    sequence = machine.must("a", 50, max_tokens=40)
    machine.run()
    assert len(sequence.output) == 40
    assert machine.finish(sequence) is FinishReason.LENGTH


def test_tokens_that_were_forced_are_computed_in_one_step(machine: Machine) -> None:
    def force(share: Share) -> ShareOutcome:
        return ShareOutcome([5] * (25 if share.sequence.output_count == 0 else 1) if share.wanted else [])

    machine.answers = force
    sequence = machine.must("a", 50, max_tokens=30)
    machine.run()
    assert [shares[0][1:] for shares in machine.shares][:3] == [(50, 1), (25, 1), (1, 1)]
    assert len(sequence.output) == 30


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.FAILED])
def test_the_engine_may_end_a_sequence(machine: Machine, finish: FinishReason) -> None:
    machine.answers = lambda share: ShareOutcome([3], finish, "because")
    sequence = machine.must("a", 50)
    machine.run()
    assert machine.endings[sequence][0][:2] == (finish, "because")
    assert sequence.output == [3]


def test_a_token_that_was_not_chosen_is_a_failure_and_no_endless_loop(machine: Machine) -> None:
    machine.answers = lambda share: ShareOutcome()
    sequence = machine.must("a", 50)
    machine.run()
    assert machine.finish(sequence) is FinishReason.FAILED


def test_an_answer_that_was_begun_elsewhere_goes_on(machine: Machine) -> None:
    sequence = machine.must("a", 50, max_tokens=10, output=(1, 2, 3))
    machine.run()
    assert sequence.output == [1, 2, 3] + [7] * 7
    assert machine.rows[sequence] == 53 + 6


def test_another_plans_outcome_is_refused(machine: Machine) -> None:
    machine.must("a", 50)
    plan = machine.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="under way"):
        machine.scheduler.settle(plan, [], machine.now, 0.1)
    machine.settle(plan)
    with pytest.raises(ValueError, match="under way"):
        machine.scheduler.settle(plan, [ShareOutcome([1])], machine.now, 0.1)


# Scoring and embedding


def test_scoring_wants_the_rows_that_foretell_its_tokens(machine: Machine) -> None:
    sequence = machine.must("a", 300, kind="score", score_from=280)
    machine.run()
    assert [shares[0][1:] for shares in machine.shares] == [(250, 0), (50, 21)] or sum(
        wanted for shares in machine.shares for _, _, wanted in shares
    ) == 21
    assert machine.finish(sequence) is FinishReason.STOP
    assert sequence.output == []


def test_scoring_reuses_what_comes_before_and_nothing_that_is_wanted(machine: Machine) -> None:
    shared = prompt(320)
    machine.must("first", (*shared, 1), max_tokens=1)
    machine.run()
    sequence = machine.must("a", (*shared, 2, 3), kind="score", score_from=161)
    machine.run()
    assert sequence.cached == 160
    assert machine.rows[sequence] == 322 - 160
    assert sum(wanted for shares in machine.shares for each, _, wanted in shares if each is sequence) == 322 - 160


def test_wanted_rows_of_a_step_are_bounded(machine: Machine) -> None:
    for number in range(4):
        machine.must(f"{number}", 400, kind="score")
    machine.run()
    assert all(sum(wanted for _, _, wanted in shares) <= machine.limits.max_results for shares in machine.shares)
    assert sum(wanted for shares in machine.shares for _, _, wanted in shares) == 1600


def test_prompt_logprobs_are_of_every_token_and_come_before_the_answer(machine: Machine) -> None:
    shared = prompt(64)
    machine.must("first", (*shared, 1), max_tokens=1)
    machine.run()
    machine.shares.clear()
    sequence = machine.must("a", shared, prompt_logprobs=2, max_tokens=3)
    machine.run()
    assert [shares[0][1:] for shares in machine.shares] == [(64, 64), (1, 1), (1, 1)]
    assert len(sequence.output) == 3


def test_results_that_were_handed_out_are_not_wanted_again_after_a_preemption() -> None:
    machine = Machine(BlockManager(40), policy=Policy(refuse_unmet=False))
    machine.must("eldest", 100, max_tokens=400)
    scored = machine.must("scored", 100, prompt_logprobs=0, max_tokens=300)
    machine.must("third", 100, max_tokens=300)
    machine.run()
    wanted = sum(wanted for shares in machine.shares for each, _, wanted in shares if each is scored)
    assert machine.scheduler.stats().preempted > 0
    # Each position of the prompt once (the last gives the first token too), and a row for each token after that.
    assert wanted == 100 + 299


def test_embeddings_get_steps_of_their_own_beside_the_streams(machine: Machine) -> None:
    chat = machine.must("chat", 50, max_tokens=100)
    machine.run(steps=3)
    embeds = [machine.must(f"{number}", 100, kind="embed") for number in range(20)]
    machine.run(steps=90)
    assert all(machine.finish(each) is FinishReason.STOP for each in embeds)
    assert {plan.hidden for plan in machine.plans} == {True, False}
    assert all(wanted == count for shares in machine.shares for each, count, wanted in shares if each in embeds)
    assert max(machine.gaps(chat)) <= SURFACES["chat"].itl + 1e-9


def test_an_encoders_texts_go_whole() -> None:
    blocks = BlockManager(1024, reuse=False)
    machine = Machine(blocks, limits=SchedulerLimits(max_sequences=16, causal=False, max_rows=512))
    texts = [machine.must(f"{number}", 30 + 97 * number % 480, kind="embed") for number in range(40)]
    machine.run()
    assert all(machine.rows[text] == len(text.tokens) for text in texts)
    assert len([share for shares in machine.shares for share in shares]) == 40
    assert max(len(shares) for shares in machine.shares) > 1
    assert machine.send("long", 600, kind="embed").parameter == "prompt"
    assert machine.send("answer", 100).parameter == "kind"


def test_a_long_rope_shares_nothing_with_a_short_one() -> None:
    machine = Machine(BlockManager(1024))
    scheduler = machine.scheduler
    scheduler._rope_variant = lambda total: int(total > 200)  # pyright: ignore[reportPrivateUsage]
    shared = prompt(160)
    machine.must("short", (*shared, 1), max_tokens=1)
    machine.run()
    long = machine.must("long", (*shared, 2), max_tokens=100)
    machine.run()
    assert (long.rope_variant, long.cached) == (1, 0)


def test_seen_tokens_are_kept_where_a_penalty_asks_for_them(machine: Machine) -> None:
    from headrace.engine.interface.sampling import SamplingParams

    plain = machine.must("plain", (1, 2, 3), max_tokens=3)
    counted = machine.must("counted", (1, 2, 7), max_tokens=3, sampling=SamplingParams(presence_penalty=0.5))
    machine.run()
    assert plain.seen == {}
    assert counted.seen == {1: 0, 2: 0, 7: 3}


# The whole


def test_it_imports_no_arrays_no_framework_and_no_event_loop() -> None:
    code = (
        "import sys, headrace.engine.scheduling.scheduler as s\n"
        "print(sorted({'numpy', 'torch', 'asyncio', 'headrace._core', 'llguidance'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_same_calls_give_the_same_plans() -> None:
    def run() -> list[list[tuple[str, int, int]]]:
        machine = Machine(BlockManager(80), policy=Policy(refuse_unmet=False))
        for number in range(30):
            machine.send(f"{number}", 40 + 37 * number % 400, tenant=f"t{number % 4}", max_tokens=20)
        machine.run()
        return [[(each.request.id, count, wanted) for each, count, wanted in shares] for shares in machine.shares]

    assert run() == run()


def test_limits_may_be_as_small_as_they_get() -> None:
    limits = SchedulerLimits(max_sequences=1, max_rows=1, least_rows=1, max_results=1)
    machine = Machine(BlockManager(64), limits=limits)
    for number in range(3):
        machine.must(f"{number}", 10, max_tokens=3)
    machine.must("score", 10, kind="score")
    machine.run()
    assert all(plan.rows == 1 for plan in machine.plans)


def test_a_policy_can_be_changed_in_every_number() -> None:
    surfaces = {"only": replace(SURFACES["chat"], itl=0.03, stretch=1.2)}
    machine = Machine(BlockManager(512), policy=Policy(surfaces=surfaces, share_cold=False, late_turns=2))
    chat = machine.must("a", 50, max_tokens=60, surface="only")
    machine.run(steps=5)
    machine.must("b", 400, surface="only")
    machine.run()
    assert max(machine.gaps(chat)) <= 0.03 + 1e-9
