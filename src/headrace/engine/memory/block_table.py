"""BlockTable: the blocks that a sequence holds. PrefixMatch: the prefix that it may reuse. BlockManager fills both."""

from __future__ import annotations

import msgspec

from headrace.engine.memory.prefix_tree import Block


class PrefixMatch(msgspec.Struct, eq=False):
    """The longest reusable prefix found so far. `BlockManager.acquire` matches again if the tree has changed."""

    salt: str
    variant: int
    packed: bytes  # the tokens
    count: int  # of the tokens
    cached_tokens: int
    path: list[Block]
    source: Block | None  # a block that begins with the tokens after the path
    stamp: int  # of the tree
    stored: int = 0  # tokens after the cached ones that a tier may have


class BlockTable(msgspec.Struct, eq=False):
    """The blocks that one sequence holds. `blocks` only grows at its end."""

    blocks: list[int]
    salt: str
    variant: int
    cached_tokens: int  # computed, once a pending copy is done
    path: list[Block]  # published blocks in the tree; may be another sequence's with the same tokens
    source: Block | None  # the block that its first own block is copied from
    tokens: int  # most that its sequence has had or asked for
    state_slot: int = -1  # of its recurrent state, if the model has one
    trail: list[int] = []  # slots for its states before each draft of a step
    rolling: Block | None = None  # whose snapshot the sequence's next one replaces
