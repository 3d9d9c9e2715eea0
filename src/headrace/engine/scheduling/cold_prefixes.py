"""Prefixes that running sequences are computing, so that a burst of requests with a new prefix computes it once.

Owns which sequence computes which blocks that nobody can find yet, and who waits for it. A prefix is known by the
fingerprints of its blocks, each a hash over the one before and the block's tokens, within a salt. A fingerprint only
decides who waits for whom: what is reused is found by its tokens (`prefix_tree.py`), so two prefixes with one
fingerprint cost a wait, and never a wrong block.
"""

from __future__ import annotations

import heapq

from headrace.engine.scheduling.waiting_queue import JobState, SequenceJob

Key = tuple[str, int]


def fingerprints(tokens: tuple[int, ...], block_tokens: int, variant: int) -> list[int]:
    """One per whole block that ends before the last token, which is always computed anew."""
    chain: list[int] = []
    known = variant
    for start in range(0, len(tokens) - block_tokens, block_tokens):
        known = hash((known, tokens[start : start + block_tokens]))
        chain.append(known)
    return chain


class ColdPrefixes:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._leaders: dict[Key, SequenceJob] = {}

    def leader(self, job: SequenceJob, cached: int) -> tuple[SequenceJob, int] | None:
        """Who is computing what comes after the `cached` tokens of this job, and up to which of its tokens."""
        chain = self._chain(job)
        first = cached // self._block_tokens
        if first >= len(chain):
            return None
        leader = self._leaders.get((job.request.salt, chain[first]))
        if leader is None or leader is job:
            return None
        others = self._chain(leader)
        # Equal up to a block means equal before it, so the first that differs can be bisected for.
        low, high = first, min(len(chain), len(others), leader.top // self._block_tokens)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] == others[middle]:
                low = middle + 1
            else:
                high = middle
        return (leader, low * self._block_tokens) if low > first else None

    def lead(self, job: SequenceJob) -> None:
        """The job begins to compute: who shares what nobody else computes already may wait for it."""
        chain = self._chain(job)
        job.top = len(chain) * self._block_tokens
        salt = job.request.salt
        for place in range(job.sequence.computed // self._block_tokens, len(chain)):
            self._leaders.setdefault((salt, chain[place]), job)

    def follow(self, job: SequenceJob, leader: SequenceJob, tokens: int) -> None:
        job.state = JobState.FOLLOWING
        job.waits_for = leader
        heapq.heappush(leader.followers, (tokens, job.number, job))

    def advance(self, leader: SequenceJob, before: int) -> list[SequenceJob]:
        """The leader has computed, and published, more than the `before` tokens: who can go on."""
        computed = min(leader.sequence.computed, leader.top)
        self._unlist(leader, before, computed)
        woken: list[SequenceJob] = []
        followers = leader.followers
        while followers and followers[0][0] <= computed:
            job = heapq.heappop(followers)[2]
            if job.waits_for is leader:
                job.waits_for = None
                woken.append(job)
        return woken

    def end(self, leader: SequenceJob) -> list[SequenceJob]:
        """The leader computes no more: its followers go on by themselves."""
        self._unlist(leader, leader.sequence.computed, leader.top)
        leader.top = 0
        woken = [job for _, _, job in sorted(leader.followers) if job.waits_for is leader]
        leader.followers.clear()
        for job in woken:
            job.waits_for = None
        return woken

    def _chain(self, job: SequenceJob) -> list[int]:
        if job.chain is None:
            job.chain = fingerprints(job.request.prompt, self._block_tokens, job.sequence.rope_variant)
        return job.chain

    def _unlist(self, leader: SequenceJob, start: int, end: int) -> None:
        salt, chain = leader.request.salt, leader.chain
        if chain is None:
            return
        for place in range(start // self._block_tokens, -(-end // self._block_tokens)):
            key = (salt, chain[place])
            if self._leaders.get(key) is leader:
                del self._leaders[key]
