"""The prefix tree: finds blocks of KV memory by their tokens, and decides which salt may find which block.

Also holds the prefixes declared public. Does not know who uses a block or when it is evicted (`block_manager.py`).

The tree has one root per rope variant and adapter: KV depends on them too. A child is keyed by its block's tokens, as
bytes, in its parent's dictionary, so a match is exact and prefixes cannot be confused. Salts share only blocks along
declared public prefixes. Where a prefix leaves them, each salt has its own branch, which no other salt reads:

    root ── public block ── public block ──┬─ "a": block ── block ── part of a block
                                           └─ "b": block
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from headrace.errors import RequestError

LOOK: Final = 16  # children compared for the best partial block; bounds the work
MOST_PUBLIC_BLOCKS: Final = 65_536  # blocks of all public prefixes: a million tokens
TOKEN_BYTES: Final = 8  # a token of an image is named by 63 bits of the image's digest
DIGEST_BYTES: Final = 32  # too long to collide: two prefixes or two salts never share a digest

Declared = dict[bytes, "Declared"]  # public prefixes, block by block


class IntegrityError(RuntimeError):
    """The accounting is inconsistent: a bug."""


def must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IntegrityError(otherwise)


def pack(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def unpack(packed: bytes) -> list[int]:
    return memoryview(packed).cast("q").tolist()


class Block:
    """A block and its place in the tree, if it has one."""

    __slots__ = ("branches", "children", "declared", "digest", "index", "key", "parent", "refs", "salt")

    def __init__(self, index: int) -> None:
        self.index = index
        self.refs = 0  # tables, pending copies and pins that hold it
        self.parent: Block | None = None  # None: not in the tree
        self.key = b""  # its tokens; fewer than a block's for the tail of a released sequence
        self.salt = ""  # salt of the sequence that computed it
        self.children: dict[bytes, Block] = {}  # children visible to every salt that finds this block
        self.branches: dict[str, dict[bytes, Block]] = {}  # of a public block: children visible to one salt
        self.declared: Declared | None = None  # public prefixes that continue it; None: not public itself
        self.digest = b""  # its name outside the tree, once `PrefixTree.digest` has computed it


def next_digest(digest: bytes, key: bytes, salt: str | None) -> bytes:
    """Return the digest of a block after the one with `digest`. `salt`: None for a public block."""
    scope = b"p" if salt is None else b"s" + hashlib.blake2b(salt.encode(), digest_size=16).digest()
    return hashlib.blake2b(digest + scope + key, digest_size=DIGEST_BYTES).digest()


class PrefixTree:
    def __init__(self, block_tokens: int, digest_key: bytes = b"") -> None:
        """`digest_key` enters all digests: whatever KV depends on beside the tokens before it."""
        self.stamp = 0  # changes with every modification
        self._digest_key = digest_key
        self._key_bytes = block_tokens * TOKEN_BYTES
        self._roots: dict[int, Block] = {}
        self._declared: Declared = {}
        self._declared_blocks = 0

    def root(self, variant: int) -> Block:
        root = self._roots.get(variant)
        if root is None:
            root = self._roots[variant] = Block(-1)
            root.declared = self._declared
            name = variant.to_bytes(4 if variant < 1 << 32 else 20)
            root.digest = hashlib.blake2b(self._digest_key + name, digest_size=DIGEST_BYTES).digest()
        return root

    def digest(self, block: Block) -> bytes:
        """Return a name of the block that is unique to its tokens, all those before them, and who may find it."""
        unnamed: list[Block] = []
        while not block.digest:
            unnamed.append(block)
            if block.parent is None:
                raise IntegrityError(f"Block {block.index} is not in the tree.")
            block = block.parent
        digest = block.digest
        for each in reversed(unnamed):
            digest = each.digest = next_digest(digest, each.key, None if each.declared is not None else each.salt)
        return digest

    def digests_after(self, node: Block, salt: str, packed: bytes) -> Iterator[tuple[bytes, str | None]]:
        """Yield digest and salt (None: public) of the whole blocks that would follow `node`, which need not exist."""
        size = self._key_bytes
        digest, declared = self.digest(node), node.declared
        for at in range(0, len(packed) - size + 1, size):
            key = packed[at : at + size]
            declared = None if declared is None else declared.get(key)
            scope = salt if declared is None else None
            digest = next_digest(digest, key, scope)
            yield digest, scope

    def walk(self, packed: bytes, usable: int, salt: str, variant: int) -> tuple[list[Block], int]:
        """Return the whole blocks within the first `usable` bytes, and where they end."""
        size = self._key_bytes
        path: list[Block] = []
        node = self.root(variant)
        at = 0
        while (end := at + size) <= usable:
            key = packed[at:end]
            child = node.children.get(key)
            if child is None:
                child = self.child(node, salt, key)
                if child is None:
                    break
            path.append(child)
            node = child
            at = end
        return path, at

    def child(self, node: Block, salt: str, key: bytes) -> Block | None:
        found = node.children.get(key)
        if found is None and node.branches:
            branch = node.branches.get(salt)
            if branch is not None:
                return branch.get(key)
        return found

    def closest(self, node: Block, salt: str, wanted: bytes) -> tuple[Block | None, int]:
        """Return the recent child that shares the most tokens with the wanted bytes, and how many."""
        number = int.from_bytes(wanted, "little")
        best, most = None, 0
        for children in (node.branches.get(salt), node.children):
            for child in islice(reversed(children.values()), LOOK) if children else ():
                shared = min(len(wanted), len(child.key)) // TOKEN_BYTES
                differing = number ^ int.from_bytes(child.key, "little")
                if differing:
                    # The lowest differing bit is in the first differing token.
                    shared = min(shared, ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES))
                if shared > most:
                    best, most = child, shared
        return best, most

    def attach(self, parent: Block, chain: list[Block], packed: bytes, salt: str) -> list[Block]:
        """Attach blocks below each other. Return the blocks that now represent these prefixes; they differ from `chain`
        where a prefix existed already. Only the last may be a partial block."""
        found: list[Block] = []
        size = self._key_bytes
        at = 0
        for own in chain:
            key = packed[at : at + size]
            at += size
            declared = None
            children = parent.children
            if parent.declared is not None:
                declared = parent.declared.get(key)
                if declared is None:
                    children = parent.branches.setdefault(salt, {})
            node = children.setdefault(key, own)
            if node is own:
                own.parent = parent
                own.key = key
                own.salt = salt
                own.declared = declared
            found.append(node)
            parent = node
        self.stamp += 1
        return found

    def detach(self, block: Block) -> None:
        """Remove a block without children from the tree."""
        parent = block.parent
        if parent is None or block.children or block.branches:
            raise IntegrityError(f"Block {block.index} is not a leaf of the tree.")
        if parent.declared is None or block.declared is not None:
            del parent.children[block.key]
        else:
            branch = parent.branches[block.salt]
            del branch[block.key]
            if not branch:
                del parent.branches[block.salt]  # salts come and go, so leave nothing behind
        block.parent = block.declared = None
        block.key = block.digest = b""
        block.salt = ""
        block.children = {}  # an emptied dictionary keeps its memory
        block.branches = {}
        self.stamp += 1

    def declare_public(self, packed: bytes) -> None:
        """Let all salts share these whole blocks, those computed before included."""
        size = self._key_bytes
        keys = [packed[at : at + size] for at in range(0, len(packed), size)]
        level = self._declared
        known = 0
        while known < len(keys) and keys[known] in level:
            level = level[keys[known]]
            known += 1
        if self._declared_blocks + len(keys) - known > MOST_PUBLIC_BLOCKS:
            raise RequestError(
                f"Public prefixes would exceed the bound of {MOST_PUBLIC_BLOCKS} blocks.",
                parameter="public_prefixes",
            )
        self._declared_blocks += len(keys) - known
        for key in keys[known:]:
            level[key] = {}
            level = level[key]
        for root in self._roots.values():
            self._make_public(root, keys)

    def _make_public(self, node: Block, keys: list[bytes]) -> None:
        """Keep one public copy of what salts computed separately. The other copies become unreachable."""
        for key in keys:
            child = node.children.get(key)
            if child is None:
                branch = next((branch for branch in node.branches.values() if key in branch), None)
                if branch is None or node.declared is None:
                    return
                child = branch.pop(key)
                if not branch:
                    del node.branches[child.salt]
                node.children[key] = child
                child.declared = node.declared[key]
                _forget_digests(child)
                if child.children:
                    child.branches = {child.salt: child.children}
                    child.children = {}
                self.stamp += 1
            node = child

    def check(self, blocks: Iterable[Block], age: Mapping[Block, int]) -> None:
        """Raise IntegrityError if the tree is inconsistent. `age` orders the idle blocks, longest idle first."""
        found = 0
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            must(node.declared is not None or not node.branches, f"block {node.index} is private and has branches")
            for salt, children in [(None, node.children), *node.branches.items()]:
                must(bool(children) or salt is None, "a branch of nothing")
                for key, child in children.items():
                    found += 1
                    pending.append(child)
                    _check_child(node, child, key, salt)
                    whole = len(key) == self._key_bytes
                    must(whole or (not child.children and not child.branches), "part of a block has children")
                    if node in age:
                        must(child in age and age[child] < age[node], f"block {child.index} outlives its parent")
        must(found == sum(block.parent is not None for block in blocks), "a block of the tree is not to be found")


def _forget_digests(block: Block) -> None:
    pending = [block]
    while pending:
        each = pending.pop()
        each.digest = b""
        for children in (each.children, *each.branches.values()):
            pending.extend(children.values())


def _check_child(node: Block, child: Block, key: bytes, salt: str | None) -> None:
    must(child.parent is node and child.key == key, f"block {child.index} is not its parent's child")
    must(salt is None or child.salt == salt, f"block {child.index} is in another salt's branch")
    must(node.declared is not None or child.salt == node.salt, f"block {child.index} has another salt than its parent")
    public = node.declared is not None and salt is None
    must((child.declared is not None) == public, f"block {child.index} is {'not ' if public else ''}public")
