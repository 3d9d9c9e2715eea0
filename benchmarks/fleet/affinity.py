"""Prefix-affine routing across hosts against random and least-loaded, on multi-turn traffic with several gateways.

The decisions are those of `headrace.engine.process.replica_choice`, which servers run. Hosts are simulated: each
computes one request after another, and keeps the prefixes of the pieces used last. So the figures compare policies;
they predict no machine. Traffic is made from a seed, or read from a file with a JSON object on each line: `at_s`,
`prompt` (token ids) and `answer_tokens`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.engine.process.replica_choice import SEQUENCE_COST, ReplicaRouter, prefix_keys

POLICIES = ("random", "least-loaded", "learned", "affine")


class Turn(NamedTuple):
    at_s: float
    prompt: tuple[int, ...]
    answer: int  # tokens


def made_traffic(seed: int, *, conversations: int, rate: float) -> list[Turn]:
    """Conversations of 1 to 10 turns that begin at random; a third of them shares each of three system prompts."""
    draw, turns, at = random.Random(seed), list[Turn](), 0.0
    systems = [[draw.randrange(50_000) for _ in range(length)] for length in (300, 900, 2000)]
    for _ in range(conversations):
        at += draw.expovariate(rate)
        text, now = list(draw.choice(systems)), at
        for _ in range(min(10, 1 + int(draw.expovariate(1 / 3)))):
            text += [draw.randrange(50_000) for _ in range(draw.randint(20, 300))]
            answer = draw.randint(30, 300)
            turns.append(Turn(now, tuple(text), answer))
            text += [draw.randrange(50_000) for _ in range(answer)]
            now += 5.0 + draw.expovariate(1 / 15)  # the reader reads and writes
    return sorted(turns)


def read_traffic(path: Path) -> list[Turn]:
    with path.open(encoding="utf-8") as lines:
        each = [json.loads(line) for line in lines]
    return sorted(Turn(one["at_s"], tuple(one["prompt"]), one.get("answer_tokens", 100)) for one in each)


class Host:
    """Computes one request after another."""

    def __init__(self, *, tokens_per_s: float, pieces: int) -> None:
        self._rate, self._most = tokens_per_s, pieces
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.free_at = 0.0
        self.sequences = 0

    def take(self, turn: Turn, keys: Sequence[int]) -> tuple[int, float, float]:
        """Return the cached tokens, and when the first token comes and the last."""
        found = 0
        for key in keys:
            if key not in self._cached:
                break
            found += 1
        for key in reversed(keys):
            self._cached[key] = None
            self._cached.move_to_end(key)
        while len(self._cached) > self._most:
            self._cached.popitem(last=False)
        first = max(turn.at_s, self.free_at) + (len(turn.prompt) - 64 * found) / self._rate
        self.free_at = first
        return 64 * found, first, first + turn.answer * 0.02


class Gateway:
    def __init__(self, policy: str, hosts: int, seed: int) -> None:
        self.policy, self._draw, self._hosts = policy, random.Random(seed), range(hosts)
        self.routes = ReplicaRouter()
        for number in self._hosts:
            self.routes.add(number, f"tls://10.0.0.{number}:9000" if policy == "affine" else "")

    def choose(self, keys: Sequence[int], length: int) -> tuple[int, float]:
        if self.policy == "random":
            return self._draw.choice(self._hosts), 0.0
        if self.policy == "least-loaded":
            return self.routes.choose((), length, self._hosts)
        return self.routes.choose(keys, length, self._hosts)


def run(policy: str, turns: Sequence[Turn], args: argparse.Namespace, *, gateways: int) -> dict[str, Any]:
    hosts = [Host(tokens_per_s=args.tokens_per_s, pieces=args.pieces) for _ in range(args.hosts)]
    fronts = [Gateway(policy, args.hosts, number) for number in range(gateways)]
    draw, later = random.Random(5), list[tuple[float, int, Callable[[], None]]]()
    own = [[0] * args.hosts for _ in fronts]
    prompt_tokens = cached_tokens = 0
    waits: list[float] = []
    noted = 0.0
    for number, turn in enumerate(turns):
        while later and later[0][0] <= turn.at_s:
            heapq.heappop(later)[2]()
        if turn.at_s - noted >= 1.0:  # each gateway looks at the registry once a second
            noted = turn.at_s
            for front, mine in zip(fronts, own, strict=True):
                for place, host in enumerate(hosts):
                    front.routes.set_other_load(place, SEQUENCE_COST * max(0, host.sequences - mine[place]))
        place = draw.randrange(gateways)  # a load balancer before the gateways
        front, mine = fronts[place], own[place]
        keys = prefix_keys(turn.prompt, "tenant")
        chosen, load = front.choose(keys, len(turn.prompt))
        cached, first, last = hosts[chosen].take(turn, keys)
        front.routes.learn(chosen, keys)
        front.routes.add_load(chosen, load)
        hosts[chosen].sequences += 1
        mine[chosen] += 1

        def begin(front: Gateway = front, chosen: int = chosen, load: float = load) -> None:
            front.routes.add_load(chosen, SEQUENCE_COST - load)

        def end(front: Gateway = front, mine: list[int] = mine, chosen: int = chosen) -> None:
            front.routes.add_load(chosen, -SEQUENCE_COST)
            hosts[chosen].sequences -= 1
            mine[chosen] -= 1

        heapq.heappush(later, (first, 2 * number, begin))
        heapq.heappush(later, (last, 2 * number + 1, end))
        prompt_tokens += len(turn.prompt)
        cached_tokens += cached
        waits.append(first - turn.at_s)
    waits.sort()
    return {
        "policy": policy,
        "gateways": gateways,
        "hit_ratio": round(cached_tokens / prompt_tokens, 4),
        "ttft_p50_ms": round(1e3 * waits[len(waits) // 2], 1),
        "ttft_p99_ms": round(1e3 * waits[int(len(waits) * 0.99)], 1),
    }


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    given = made_traffic(args.seed, conversations=args.conversations, rate=args.rate)
    turns = given if args.traffic is None else read_traffic(args.traffic)
    for gateways in (1, 4):
        for policy in POLICIES:
            yield {"turns": len(turns), **run(policy, turns, args, gateways=gateways)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traffic", type=Path, help="JSON lines in place of traffic made from --seed")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--tokens-per-s", type=float, default=2000.0, help="prefill of one host")
    parser.add_argument("--pieces", type=int, default=1500, help="pieces of 64 tokens that a host keeps")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=2.0, help="conversations that begin in a second")
    parser.add_argument("--seed", type=int, default=1)
    for row in rows(parser.parse_args()):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
