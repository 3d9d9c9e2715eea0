"""The host's view of KV memory: which blocks are in use, which can be found again, and which are evicted.

Owns the blocks' reference counts, the eviction order and pending copies; the prefix tree (`prefix_tree.py`) finds
blocks by tokens, and `prefix_pins.py` keeps pinned prefixes. Does not know KV bytes, requests or time. Belongs to one
thread. A block is in one of three states:

    free ──take──▶ used (refs > 0) ──last holder releases──▶ idle, if it is in the tree ──oldest first──▶ free
                        ▲                                      │             └ else free at once
                        └──────────── found again ─────────────┘

Two invariants make eviction O(1): a holder of a block in the tree holds all blocks before it, and holders release from
the tail to the head. So an idle block was released no earlier than its children, and the one released first has none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from headrace.engine.memory.block_stats import BlockStats, SaltStats
from headrace.engine.memory.block_table import BlockTable, PrefixMatch
from headrace.engine.memory.prefix_pins import PinnedPrefix, PrefixPins
from headrace.engine.memory.prefix_tree import TOKEN_BYTES, Block, PrefixTree, must, pack
from headrace.engine.memory.state_pool import StatePool
from headrace.errors import RequestError

MOST_SALTS: Final = 256  # salts with their own statistics; later ones are counted together as OTHER_SALTS
OTHER_SALTS: Final = "*"
LONE: Final = "alone "  # salts that begin with this belong to one request, so nothing outside keeps their KV


class BlockTier(Protocol):
    """What keeps KV that left the block memory (`kv_tiers.py`)."""

    def evicted(self, block: int, digest: bytes, salt: str | None) -> None:
        """A block's memory is about to be reused. `salt`: None if it is public."""
        ...

    def has(self, digest: bytes) -> bool: ...

    def recall(self, match: PrefixMatch, *, patient: bool) -> bool:
        """Bring back what follows the match. Return whether anything came back."""
        ...


class BlockManager:
    """`copies` allows reuse of part of a block by copying it. `reuse=False` finds nothing again, as an encoder needs,
    because its KV depends on later tokens. `most_pinned` is in blocks and defaults to half of all. With `states`, a
    prefix can be reused up to a block after which a state is kept, and nothing can be pinned or forked."""

    def __init__(
        self,
        count: int,
        block_tokens: int = 16,
        *,
        copies: bool = True,
        reuse: bool = True,
        most_pinned: int | None = None,
        digest_key: bytes = b"",
        states: StatePool | None = None,
    ) -> None:
        if count < 1 or block_tokens < 1:
            raise ValueError(f"Cannot manage {count} blocks of {block_tokens} tokens.")
        self.count = count
        self.block_tokens = block_tokens
        self._key_bytes = block_tokens * TOKEN_BYTES
        self._partial = copies and states is None
        self.states = states
        self._reuse = reuse
        self._tree = PrefixTree(block_tokens, digest_key)
        self.tier: BlockTier | None = None
        self._blocks = [Block(index) for index in range(count)]
        self._free = self._blocks[::-1]
        self._idle: OrderedDict[Block, None] = OrderedDict()  # released longest ago first
        self._copies: dict[Block, Block] = {}  # target -> source, in the order in which they must be made
        self._tables: set[BlockTable] = set()
        self._pins = PrefixPins(
            self._tree,
            block_tokens,
            most_blocks=count // 2 if most_pinned is None else most_pinned,
            hold=self._hold,
            drop=self._drop,
        )
        self._evictions = 0
        self._copied = 0
        self._salts: dict[str, SaltStats] = {}

    @property
    def reuses(self) -> bool:
        """Whether released blocks can be found again."""
        return self._reuse

    @property
    def stamp(self) -> int:
        """A number that changes when blocks enter or leave the tree."""
        return self._tree.stamp

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def largest_sequence(self) -> int:
        """Tokens of a sequence that fits when no other runs, whatever is pinned."""
        return (self.count - self._pins.reserved()) * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    # Finding and holding

    def match(self, tokens: Sequence[int], salt: str, *, variant: int = 0) -> PrefixMatch:
        """Return the longest reusable prefix, always short of the last token, whose result is needed. Takes no
        reference."""
        return self._find(pack(tokens), len(tokens), salt, variant)

    def refresh(self, match: PrefixMatch) -> PrefixMatch:
        """Match again; free if the tree has not changed."""
        if match.stamp == self._tree.stamp:
            return match
        return self._find(match.packed, match.count, match.salt, match.variant)

    def _find(self, packed: bytes, count: int, salt: str, variant: int) -> PrefixMatch:
        tree = self._tree
        usable = (count - 1) * TOKEN_BYTES
        path, at = tree.walk(packed, usable, salt, variant)
        if self.states is not None:
            while path and not self.states.has(path[-1]):
                path.pop()
            at = len(path) * self._key_bytes
        source, shared = None, 0
        if self._partial and at < usable:
            node = path[-1] if path else tree.root(variant)
            source, shared = tree.closest(node, salt, packed[at : min(at + self._key_bytes, usable)])
        cached = at // TOKEN_BYTES + shared
        match = PrefixMatch(salt, variant, packed, count, cached, path, source, tree.stamp)
        if self.tier is not None:
            blocks = sum(1 for _ in self.stored_after(match))
            match.stored = max(0, at // TOKEN_BYTES + blocks * self.block_tokens - cached)
        return match

    def stored_after(self, match: PrefixMatch) -> Iterator[tuple[bytes, str | None]]:
        """Yield digest and salt of the whole blocks after the match that the tier has."""
        tier, tree = self.tier, self._tree
        if tier is None or match.salt.startswith(LONE):
            return
        node = match.path[-1] if match.path else tree.root(match.variant)
        rest = match.packed[len(match.path) * self._key_bytes : (match.count - 1) * TOKEN_BYTES]
        for digest, salt in tree.digests_after(node, match.salt, rest):
            if not tier.has(digest):
                return
            yield digest, salt

    def recall(self, match: PrefixMatch, *, patient: bool) -> None:
        """Bring back the KV that the tier has after the match, into blocks of the tree. `patient`: nothing else waits
        for it."""
        if self.tier is not None and match.stored:
            self.tier.recall(match, patient=patient)

    def cold_blocks(self) -> Iterator[tuple[int, bytes, str | None]]:
        """Yield the idle whole blocks that a tier may keep, released longest ago first: index, digest and salt."""
        for block in self._idle:
            if self._is_keepable(block):
                yield block.index, self._tree.digest(block), None if block.declared is not None else block.salt

    def _is_keepable(self, block: Block) -> bool:
        whole = len(block.key) == self._key_bytes
        return whole and (block.declared is not None or not block.salt.startswith(LONE))

    def acquire(self, match: PrefixMatch, total_tokens: int) -> BlockTable | None:
        """Hold the matched blocks and take new ones for the rest of `total_tokens`. Return None, with nothing changed,
        if there are not enough."""
        match = self.refresh(match)
        table = self._acquire(match, total_tokens)
        if table is not None:
            label = match.salt if match.salt in self._salts or len(self._salts) < MOST_SALTS else OTHER_SALTS
            stats = self._salts.setdefault(label, SaltStats())
            stats.asked += match.count
            stats.hit += table.cached_tokens
        return table

    def _acquire(self, match: PrefixMatch, total_tokens: int) -> BlockTable | None:
        path, source, cached = match.path, match.source, match.cached_tokens
        needed = self.blocks_for(total_tokens) - len(path)
        if total_tokens < cached:
            raise ValueError(f"room for {total_tokens} tokens, of which {cached} are cached")
        idle = self._idle
        spare = self.available - sum(1 for block in path if not block.refs)
        if source is not None and not source.refs and needed >= spare:
            # Its own block may be needed. Recomputing a few tokens is better than waiting for ever.
            source, cached = None, len(path) * self.block_tokens
        if needed > spare or (self.states is not None and not self.states.available):
            return None
        for block in path:
            if not block.refs:
                del idle[block]
            block.refs += 1
        if source is not None:
            self._hold(source)
        own = [self._take() for _ in range(needed)]
        if source is not None:
            self._copies[own[0]] = source
        blocks = [block.index for block in path]
        blocks += [block.index for block in own]
        table = BlockTable(blocks, match.salt, match.variant, cached, path[:], source, total_tokens)
        if self.states is not None:
            table.state_slot = self.states.take(path[-1] if path else None)
        self._tables.add(table)
        return table

    def grow(self, table: BlockTable, total_tokens: int) -> bool:
        """Make room for `total_tokens`. Return False, with nothing changed, if there is not enough."""
        needed = self.blocks_for(total_tokens) - len(table.blocks)
        if needed > 0:
            self._check_open(table)
            if needed > len(self._free) + len(self._idle):
                return False
            table.blocks += [self._take().index for _ in range(needed)]
        if total_tokens > table.tokens:
            table.tokens = total_tokens
        return True

    def fork(self, table: BlockTable, tokens: int) -> BlockTable | None:
        """Return a second table over the first `tokens`, all of them computed and published. Whole blocks are shared;
        the block that both continue to write is copied. Return None, with nothing changed, if no block is free."""
        self._check_open(table)
        if self.states is not None:
            raise ValueError("A sequence with a recurrent state cannot be forked.")
        whole, part = divmod(tokens, self.block_tokens)
        if self.blocks_for(tokens) > len(table.blocks):
            raise ValueError(f"a fork at {tokens} tokens of a table of {len(table.blocks)} blocks")
        if self._reuse and whole > len(table.path):
            # If only one sequence published it later, a shared block would hang below blocks that the other does not
            # hold.
            raise ValueError(f"a fork at {tokens} tokens, of which {len(table.path) * self.block_tokens} are published")
        if part and not self.available:
            return None
        path = table.path[:whole]
        shared = path + [self._blocks[index] for index in table.blocks[len(path) : whole]]
        for block in shared:
            block.refs += 1
        blocks = [block.index for block in shared]
        if part:
            source = self._blocks[table.blocks[whole]]
            source.refs += 1
            target = self._take()
            self._copies[target] = source
            blocks.append(target.index)
        fork = BlockTable(blocks, table.salt, table.variant, tokens, path, None, tokens)
        self._tables.add(fork)
        return fork

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies (source, target) to make, in this order, before the next step writes anything."""
        due, self._copies = self._copies, {}
        self._copied += len(due)
        copies = [(source.index, target.index) for target, source in due.items()]
        for source in due.values():
            self._drop(source)
        return copies

    def release(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Release the table. Computed blocks stay reusable until their memory is needed, tails going first."""
        self._check_open(table)
        if self._reuse:
            computed = self._present(table, computed)
            self.publish(table, tokens, computed)
            if computed % self.block_tokens and self.states is None:
                self._keep_tail(table, tokens, computed)
        self._tables.remove(table)
        if self.states is not None:
            self.states.give_back(table.state_slot)
            self.states.take_back(table.trail)
        blocks, idle, path = self._blocks, self._idle, table.path
        for index in reversed(table.blocks[len(path) :]):
            self._drop(blocks[index])
        for block, index in zip(reversed(path), reversed(table.blocks[: len(path)]), strict=True):
            if block.index != index:
                self._drop(blocks[index])
            block.refs -= 1
            if not block.refs:
                idle[block] = None

    def _check_open(self, table: BlockTable) -> None:
        if table not in self._tables:
            raise ValueError("The table was released before or belongs to another manager.")

    def _take(self) -> Block:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            if self.tier is not None and self._is_keepable(block):
                salt = None if block.declared is not None else block.salt
                self.tier.evicted(block.index, self._tree.digest(block), salt)
            if self.states is not None:
                self.states.forget(block)
            self._tree.detach(block)
            self._evictions += 1
        block.refs = 1
        return block

    def _hold(self, block: Block) -> None:
        if not block.refs:
            del self._idle[block]
        block.refs += 1

    def _drop(self, block: Block) -> None:
        block.refs -= 1
        if block.refs:
            return
        if block.parent is not None:
            self._idle[block] = None
            return
        self._free.append(block)
        source = self._copies.pop(block, None)  # a copy that is no longer needed
        if source is not None:
            self._drop(source)

    # Recurrent states

    def extend_trail(self, table: BlockTable, drafts: int) -> int:
        """Hold slots for the states before so many drafts. Return for how many there are."""
        if self.states is None:
            return drafts
        while len(table.trail) < drafts and (slot := self.states.lend()) is not None:
            table.trail.append(slot)
            self._tree.stamp += 1  # a snapshot may have gone for it
        return min(drafts, len(table.trail))

    def rewind_state(self, table: BlockTable, held: int) -> None:
        """Let the sequence go on from its state after `held` of the drafts: those after it were rejected."""
        table.state_slot, table.trail[held] = table.trail[held], table.state_slot

    def keep_state(
        self, table: BlockTable, tokens: Sequence[int], computed: int, *, rolling: bool = False, slot: int | None = None
    ) -> None:
        """Keep the sequence's state after its first `computed` tokens, if they end a block. Call it before the next
        step. `rolling`: it replaces the last state that was kept so for this sequence. `slot` has the state if the
        sequence's own is past it."""
        states = self.states
        if states is None or not self._reuse or not computed or computed % self.block_tokens:
            return
        self.publish(table, tokens, computed)
        if len(table.path) * self.block_tokens != computed:
            return
        block = table.path[-1]
        if rolling and table.rolling is not None:
            states.forget(table.rolling)
        is_new = states.keep(table.state_slot if slot is None else slot, block)
        table.rolling = block if is_new and rolling else None
        self._tree.stamp += 1  # what can be reused has changed

    # Publishing

    def publish(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Make whole blocks among the first `computed` tokens findable. Cheap if there is none new."""
        path = table.path
        first = len(path)
        last = computed // self.block_tokens
        if last <= first or not self._reuse:
            return
        if self._copies:
            last = max(first, self._present(table, computed) // self.block_tokens)
        packed = self._packed_part(tokens, first * self.block_tokens, last * self.block_tokens)
        parent = path[-1] if path else self._tree.root(table.variant)
        chain = [self._blocks[index] for index in table.blocks[first:last]]
        found = self._tree.attach(parent, chain, packed, table.salt)
        if found != chain:
            for own, block in zip(chain, found, strict=True):
                if own is not block:
                    self._hold(block)  # another sequence computed the same; keep our own block until release
        path += found
        if table.source is not None and last > first:
            self._forget_outgrown(table.source, path[first], table.salt)
            table.source = None
        if self._pins.unmet:
            self._pins.extend()

    def _present(self, table: BlockTable, computed: int) -> int:
        """Return the computed tokens before the first block that still waits for its copy."""
        if self._copies:
            first = len(table.path)
            for place, index in enumerate(table.blocks[first : self.blocks_for(computed)], first):
                if self._blocks[index] in self._copies:
                    return place * self.block_tokens
        return computed

    def _packed_part(self, tokens: Sequence[int], start: int, end: int) -> bytes:
        packed = pack(tokens[start:end])
        if len(packed) != (end - start) * TOKEN_BYTES:
            raise ValueError(f"{end} tokens are computed, and only {len(tokens)} given")
        return packed

    def _keep_tail(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Keep the partial block at a sequence's end, unless a block that begins with it exists."""
        whole = computed // self.block_tokens
        parent = table.path[-1] if table.path else self._tree.root(table.variant)
        key = self._packed_part(tokens, whole * self.block_tokens, computed)
        child, shared = self._tree.closest(parent, table.salt, key)
        if child is not None and shared * TOKEN_BYTES == len(key):
            if not child.refs:
                self._idle.move_to_end(child)  # as recent as if it were ours; its parent is released after it
            return
        own = self._blocks[table.blocks[whole]]
        self._tree.attach(parent, [own], key, table.salt)
        if child is not None:
            self._forget_outgrown(child, own, table.salt)

    def _forget_outgrown(self, part: Block, longer: Block, salt: str) -> None:
        """Free a partial block that the same conversation has since filled further."""
        in_tree = part.parent is not None and part.parent is longer.parent and part.salt == salt
        if in_tree and not part.refs and len(part.key) < len(longer.key) and longer.key.startswith(part.key):
            del self._idle[part]
            self._tree.detach(part)
            self._free.append(part)

    # Public and pinned prefixes

    def declare_public(self, tokens: Sequence[int]) -> int:
        """Let all salts share this prefix in whole blocks. Return the tokens of those blocks."""
        whole = self._whole_blocks(tokens)
        self._tree.declare_public(whole)
        return len(whole) // TOKEN_BYTES

    def pin(self, tokens: Sequence[int], salt: str, *, variant: int = 0) -> int:
        """Keep this prefix in memory in whole blocks: what is computed now, and the rest once it is computed. Return
        how many of its tokens are computed."""
        if self.states is not None:
            raise RequestError(
                "This model has recurrent layers, so its prefixes cannot be pinned. Repeated prefixes are still reused "
                "while they are recent.",
                parameter="pin",
            )
        packed = self._whole_blocks(tokens)
        if not packed:
            raise RequestError(
                f"A prefix of {len(tokens)} tokens fills no block, so it cannot be pinned.", parameter="pin"
            )
        return len(self._pins.add(packed, salt, variant).path) * self.block_tokens

    def unpin(self, tokens: Sequence[int], salt: str, *, variant: int = 0) -> bool:
        """Stop keeping a prefix. Return False if it was not pinned."""
        return self._pins.remove(self._whole_blocks(tokens), salt, variant)

    def pinned(self) -> list[PinnedPrefix]:
        """Pinned prefixes in the order in which they were pinned."""
        return self._pins.listed()

    def restore(self, tokens: Sequence[int], salt: str, *, variant: int = 0) -> BlockTable | None:
        """Return a table for a saved prefix; None if memory is short. The caller writes the KV of the tokens after
        `cached_tokens`, which end at a block, and releases the table with all its tokens computed."""
        packed = pack(tokens)
        path, at = self._tree.walk(packed, len(packed), salt, variant)
        cached = at // TOKEN_BYTES
        return self._acquire(PrefixMatch(salt, variant, packed, len(tokens), cached, path, None, 0), len(tokens))

    def _whole_blocks(self, tokens: Sequence[int]) -> bytes:
        return pack(tokens[: len(tokens) // self.block_tokens * self.block_tokens])

    # Statistics and checks

    @property
    def fragmentation(self) -> float:
        """Share of the slots of used blocks that no sequence uses yet."""
        slots = (self.count - self.available) * self.block_tokens
        return self._unfilled() / slots if slots else 0.0

    def _unfilled(self) -> int:
        return sum(len(table.blocks) * self.block_tokens - table.tokens for table in self._tables)

    def stats(self) -> BlockStats:
        return BlockStats(
            block_tokens=self.block_tokens,
            total=self.count,
            free=len(self._free),
            cached=len(self._idle),
            used=self.count - self.available,
            pinned=len(set(self._pins.held())),
            unfilled=self._unfilled(),
            fragmentation=self.fragmentation,
            evictions=self._evictions,
            copies=self._copied,
            salts={salt: SaltStats(stats.asked, stats.hit) for salt, stats in self._salts.items()},
        )

    def check(self) -> None:
        """Raise IntegrityError if the accounting is inconsistent. Checks everything: for tests and idle moments."""
        refs = [0] * self.count
        for table in self._tables:
            for index in table.blocks:
                refs[index] += 1
            for block, index in zip(table.path, table.blocks, strict=False):
                refs[block.index] += block.index != index
        for block in self._pins.held():
            refs[block.index] += 1
        for target, source in self._copies.items():
            refs[source.index] += 1
            must(target.refs > 0 and target.parent is None, f"block {target.index} waits for a copy that none needs")
        must([block.refs for block in self._blocks] == refs, "references are not what tables, pins and copies hold")
        free = {block.index for block in self._free}
        idle = {block.index for block in self._idle}
        must(len(free) == len(self._free) and not free & idle, "a block is free twice")
        must(free | idle == {index for index in range(self.count) if not refs[index]}, "a block is lost")
        must(all(self._blocks[index].parent is None for index in free), "a free block is in the tree")
        must(all(self._blocks[index].parent is not None for index in idle), "an idle block is not in the tree")
        if self.states is not None:
            self.states.check(
                [table.state_slot for table in self._tables], [slot for table in self._tables for slot in table.trail]
            )
        self._tree.check(self._blocks, {block: place for place, block in enumerate(self._idle)})
