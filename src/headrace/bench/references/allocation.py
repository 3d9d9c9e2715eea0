"""Simulates KV memory that is reserved in one piece per sequence, beside pages, on the same requests.

One unit of time computes one token of each running sequence; prompts take none. Requests start in their order when
there is memory. It measures memory alone, so it needs no step times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec

AllocationPolicy = Literal["paged", "contiguous-request", "contiguous-context"]
POLICIES: Final[tuple[AllocationPolicy, ...]] = get_args(AllocationPolicy)


class MemoryRequest(msgspec.Struct, frozen=True):
    prompt: int
    answer: int  # tokens that it will have
    most: int  # tokens that it may have: max_tokens


class AllocationResult(msgspec.Struct, frozen=True, kw_only=True):
    policy: AllocationPolicy
    block: int  # tokens; 0: the policy has no blocks
    at_once: float  # sequences, mean over the time
    wasted: float  # share of the reserved slots without a token, mean over the time
    unusable: float  # share of the memory that is free while a request waits, mean over the time
    time: int  # until the last request ended
    preempted: int


class _Running(msgspec.Struct):
    request: MemoryRequest
    tokens: int
    start: int = 0  # of its piece
    reserved: int = 0


def simulate_allocation(
    requests: Sequence[MemoryRequest],
    policy: AllocationPolicy,
    *,
    kv_tokens: int,
    context: int,
    block: int = 16,
) -> AllocationResult:
    """Serve the requests in order. A request that could never fit counts as one that takes all of the memory."""
    waiting = deque(requests)
    running: list[_Running] = []
    time = preempted = 0
    at_once = wasted = unusable = 0.0
    while waiting or running:
        while waiting and (started := _start(waiting[0], running, policy, kv_tokens, context, block)) is not None:
            waiting.popleft()
            running.append(started)
        used = sum(each.reserved for each in running)
        at_once += len(running)
        wasted += 1.0 - sum(each.tokens for each in running) / used
        unusable += (kv_tokens - used) / kv_tokens if waiting else 0.0
        time += 1
        for each in running:
            each.tokens += 1
        running = [each for each in running if each.tokens < each.request.prompt + each.request.answer]
        if policy == "paged":
            for each in running:
                each.reserved = block * math.ceil((each.tokens + 1) / block)
            while len(running) > 1 and sum(each.reserved for each in running) > kv_tokens:
                waiting.appendleft(running.pop().request)  # the youngest; it starts again
                preempted += 1
    return AllocationResult(
        policy=policy,
        block=block if policy == "paged" else 0,
        at_once=at_once / max(time, 1),
        wasted=wasted / max(time, 1),
        unusable=unusable / max(time, 1),
        time=time,
        preempted=preempted,
    )


def _start(
    request: MemoryRequest,
    running: Sequence[_Running],
    policy: AllocationPolicy,
    kv_tokens: int,
    context: int,
    block: int,
) -> _Running | None:
    if policy == "paged":
        needed = block * math.ceil((request.prompt + 1) / block)
        fits = not running or sum(each.reserved for each in running) + needed <= kv_tokens
        return _Running(request, request.prompt, reserved=needed) if fits else None
    needed = context if policy == "contiguous-context" else request.prompt + request.most
    needed = min(needed, kv_tokens)
    at = 0
    for each in sorted(running, key=lambda one: one.start):  # the first gap that is long enough
        if each.start - at >= needed:
            break
        at = each.start + each.reserved
    return _Running(request, request.prompt, at, needed) if at + needed <= kv_tokens else None
