"""BlockStats: what a BlockManager's memory is used for, and how often prefixes were found in it."""

from __future__ import annotations

import msgspec


class SaltStats(msgspec.Struct):
    asked: int = 0  # tokens of the sequences that acquired blocks
    hit: int = 0  # of those, tokens found in the cache


class BlockStats(msgspec.Struct, frozen=True):
    block_tokens: int
    total: int
    free: int
    cached: int  # idle: reusable, and evicted when memory is needed
    used: int
    pinned: int  # of the used blocks
    unfilled: int  # token slots of sequences' blocks that they do not use yet
    fragmentation: float  # share of unfilled slots among all slots of used blocks
    evictions: int  # in total, as are the copies and the tokens of salts
    copies: int
    salts: dict[str, SaltStats]
