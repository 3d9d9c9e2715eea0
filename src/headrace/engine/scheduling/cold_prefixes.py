"""Tracks prefixes that are being computed, so that a burst of requests with one new prefix computes it once.

A prefix is identified by the fingerprints of its blocks: a hash over the previous fingerprint and the block's tokens,
within a salt. Fingerprints only decide who waits for whom; reuse compares tokens (`prefix_tree.py`). So a collision
costs a wait, never a wrong block.
"""

from __future__ import annotations

import heapq

from headrace.engine.scheduling.waiting_queue import JobState, SequenceJob

Key = tuple[str, int]


def fingerprints(tokens: tuple[int, ...], block_tokens: int, variant: int) -> list[int]:
    """Return one fingerprint per whole block before the last token, which is always computed."""
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
        """Return the job that is computing what follows this job's `cached` tokens, and up to which token they
        agree."""
        chain = self._chain(job)
        first = cached // self._block_tokens
        if first >= len(chain):
            return None
        leader = self._leaders.get((job.request.salt, chain[first]))
        if leader is None or leader is job:
            return None
        others = self._chain(leader)
        # Chains that are equal at a block are equal before it, so bisect for the first difference.
        low, high = first, min(len(chain), len(others), leader.top // self._block_tokens)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] == others[middle]:
                low = middle + 1
            else:
                high = middle
        return (leader, low * self._block_tokens) if low > first else None

    def lead(self, job: SequenceJob) -> None:
        """Register a job that begins to compute, so that others with the same prefix can wait for it."""
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
        """Return the followers that can continue, now that the leader has published more than `before` tokens."""
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
        """Return all followers of a leader that computes no more. They continue by themselves."""
        self._unlist(leader, leader.sequence.computed, leader.top)
        leader.top = 0
        woken = [job for _, _, job in sorted(leader.followers) if job.waits_for is leader]
        leader.followers.clear()
        for job in woken:
            job.waits_for = None
        return woken

    def _chain(self, job: SequenceJob) -> list[int]:
        if job.chain is None:
            job.chain = fingerprints(job.sequence.prompt_ids, self._block_tokens, job.sequence.kv_variant)
        return job.chain

    def _unlist(self, leader: SequenceJob, start: int, end: int) -> None:
        salt, chain = leader.request.salt, leader.chain
        if chain is None:
            return
        for place in range(start // self._block_tokens, -(-end // self._block_tokens)):
            key = (salt, chain[place])
            if self._leaders.get(key) is leader:
                del self._leaders[key]
