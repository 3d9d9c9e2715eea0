"""Which replica a request goes to: prefixes stay together as long as that is sooner, and never longer."""

from __future__ import annotations

import random

from headrace.engine.process.replica_choice import (
    PIECE,
    SEQUENCE_COST,
    ReplicaRole,
    ReplicaRouter,
    eligible,
    prefix_keys,
)

PREFIX = list(range(1000))


def send(routes: ReplicaRouter, tokens: list[int], *, salt: str = "", usable: tuple[int, ...] = (0, 1)) -> int:
    keys = prefix_keys(tokens, salt)
    chosen, load = routes.choose(keys, len(tokens), usable)
    routes.add_load(chosen, load)
    routes.learn(chosen, keys)
    return chosen


def test_requests_without_a_common_prefix_take_turns() -> None:
    routes = ReplicaRouter(3)
    found = [send(routes, [n] * 100, usable=(0, 1, 2)) for n in range(9)]
    assert sorted(found[:3]) == [0, 1, 2]
    assert [found.count(replica) for replica in range(3)] == [3, 3, 3]


def test_a_prefix_goes_where_it_is() -> None:
    routes = ReplicaRouter(2)
    first = send(routes, PREFIX)
    routes.add_load(first, -routes.load(first))  # it has ended
    assert [send(routes, [*PREFIX, n]) for n in range(5)] == [first] * 5


def test_but_not_where_it_would_have_to_wait_longer_than_it_saves() -> None:
    routes = ReplicaRouter(2)
    first = send(routes, PREFIX)
    routes.add_load(first, 5000.0)
    assert send(routes, PREFIX) == 1 - first


def test_the_load_of_replicas_differs_by_what_a_prefix_saves_at_most() -> None:
    routes = ReplicaRouter(4)
    chooser = random.Random(1)
    for _ in range(400):
        send(routes, [*PREFIX, chooser.randrange(10_000)], usable=(0, 1, 2, 3))
        loads = [routes.load(replica) for replica in range(4)]
        assert max(loads) - min(loads) <= len(PREFIX) + 2 * PIECE + 100


def test_salts_do_not_share() -> None:
    routes = ReplicaRouter(2)
    first = send(routes, PREFIX, salt="a")
    assert send(routes, PREFIX, salt="b") == 1 - first


def test_a_new_process_has_nothing_cached() -> None:
    routes = ReplicaRouter(2)
    first = send(routes, PREFIX)
    routes.forget(first)
    routes.add_load(first, 1.0 - routes.load(first))
    assert send(routes, PREFIX) == 1 - first


def test_only_usable_replicas_are_chosen() -> None:
    routes = ReplicaRouter(3)
    assert {send(routes, [n] * 70, usable=(2,)) for n in range(5)} == {2}


def test_the_beginning_of_a_text_is_remembered_longest() -> None:
    routes = ReplicaRouter(2, most_pieces=4)
    first = send(routes, PREFIX)
    routes.add_load(first, -routes.load(first))
    assert send(routes, PREFIX[: 4 * PIECE]) == first


def test_a_key_stands_for_everything_before_it() -> None:
    keys = prefix_keys(PREFIX, "")
    assert len(keys) == len(PREFIX) // PIECE
    changed = prefix_keys([1, *PREFIX[1:]], "")
    assert not set(keys) & set(changed)
    assert prefix_keys(PREFIX[:PIECE], "") == keys[:1]


# Standby and preemptible replicas


def test_a_standby_replica_stands_in_for_each_that_is_missing() -> None:
    active, standby = (
        [ReplicaRole(0), ReplicaRole(1)],
        [ReplicaRole(2, is_standby=True), ReplicaRole(3, is_standby=True)],
    )
    assert eligible(active + standby, wanted=2, batch=False) == [0, 1]
    assert eligible(active[1:] + standby, wanted=2, batch=False) == [1, 2]
    assert eligible(standby, wanted=2, batch=True) == [2, 3]


def test_batch_work_goes_to_preemptible_replicas_and_the_rest_only_if_nothing_else_is_left() -> None:
    safe, preemptible = [ReplicaRole(0), ReplicaRole(1)], [ReplicaRole(2, is_preemptible=True)]
    assert eligible(safe + preemptible, wanted=3, batch=True) == [2]
    assert eligible(safe + preemptible, wanted=3, batch=False) == [0, 1]
    assert eligible(safe, wanted=3, batch=True) == [0, 1]
    assert eligible(preemptible, wanted=3, batch=False) == [2]
    assert eligible([], wanted=3, batch=False) == []


def test_a_removed_replica_leaves_nothing_and_a_new_one_starts_empty() -> None:
    routes = ReplicaRouter(1)
    first = send(routes, PREFIX, usable=(0,))
    routes.add(1)
    routes.remove(first)
    routes.add_load(first, -5.0)  # what ended there late
    assert send(routes, PREFIX, usable=(1,)) == 1
    assert routes.load(1) == len(PREFIX) + SEQUENCE_COST


def shared(*, replicas: int = 4) -> ReplicaRouter:
    routes = ReplicaRouter()
    for number in range(replicas):
        routes.add(number, f"tls://10.0.0.{number}:9000")
    return routes


def test_servers_that_share_workers_send_a_conversation_to_the_same_one() -> None:
    first, second = shared(), shared()
    everywhere = range(4)
    for routes in (first, second):
        for replica in everywhere:
            routes.learn(replica, prefix_keys(PREFIX, ""))  # a system prompt that all have
    homes: list[int] = []
    for number in range(40):
        opening = [*PREFIX, *[5000 + number] * 100]
        keys = prefix_keys(opening, "")
        home, _ = first.choose(keys, len(opening), everywhere)
        first.learn(home, keys)
        longer = [*opening, *range(200)]
        assert second.choose(prefix_keys(longer, ""), len(longer), everywhere)[0] == home
        assert first.choose(prefix_keys(longer, ""), len(longer), everywhere)[0] == home
        homes.append(home)
    assert all(homes.count(replica) >= 4 for replica in everywhere)


def test_a_home_with_more_than_its_share_of_the_load_takes_no_new_conversation() -> None:
    routes = shared(replicas=2)
    keys = prefix_keys(PREFIX, "")
    home, cost = routes.choose(keys, len(PREFIX), (0, 1))
    routes.add_load(home, 4 * cost)
    routes.set_other_load(1 - home, cost)
    assert routes.choose(keys, len(PREFIX), (0, 1))[0] == 1 - home
    routes.set_other_load(1 - home, 4 * cost)  # other servers' requests count
    assert routes.choose(keys, len(PREFIX), (0, 1))[0] == home


def test_conversations_of_a_lost_worker_move_and_the_others_stay() -> None:
    openings = [[number] * 100 for number in range(60)]

    def homes(usable: tuple[int, ...]) -> list[int]:
        return [shared().choose(prefix_keys(each, ""), len(each), usable)[0] for each in openings]

    before, after = homes((0, 1, 2, 3)), homes((0, 1, 2))
    assert [new for old, new in zip(before, after, strict=True) if old != 3] == [old for old in before if old != 3]
    assert 3 in before


def test_keys_are_the_same_in_every_process() -> None:
    assert prefix_keys([1] * PIECE, "a") == [7158830585536412818]
