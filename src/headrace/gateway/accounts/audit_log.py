"""The audit log: a hash chain of entries that say who changed what.

    row n:   body = {"seq": n, "at": ..., "who": ..., "what": ..., "before": ..., "after": ...}
             hash = SHA-256(hash of row n-1, newline, body)

Builds entries and verifies chains; does not store them. A row that was changed, removed from the middle or inserted
breaks the chain from there on. Someone who can write to the storage could still cut off its end or rebuild it: against
that, keep its head (number and hash) elsewhere and verify against it. The server's log has the head of every change.

The oldest rows are pruned when there are too many or they are too old. Each pruning is itself an entry, with the number
and hash of the last removed row, so that the rest can be verified from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.gateway.accounts.key_secrets import hidden

ZERO: Final = "0" * 64
PRUNE: Final = "audit.prune"
SELF: Final = "headrace"  # `who` of changes by the server itself


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A change."""

    at: int  # seconds since 1970, by the machine's clock
    who: str  # the key's id, or "local"
    what: str  # such as key.create
    target: str = ""  # such as key:key_0123456789abcdef
    tenant: str = ""
    request: str = ""
    reason: str = ""
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class AuditRow(msgspec.Struct, frozen=True):
    """An entry with its number and hash."""

    seq: int
    body: str  # canonical JSON
    hash: str


class ChainPosition(msgspec.Struct, frozen=True):
    """A position in the chain: its head, or the last pruned row."""

    seq: int = 0
    hash: str = ZERO

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"

    @classmethod
    def read(cls, text: str) -> ChainPosition:
        """Parse NUMBER:HASH; raise ValueError if it is invalid."""
        seq, _, hash = text.partition(":")
        if not (seq.isascii() and seq.isdigit() and len(seq) < 19 and len(hash) == 64):
            raise ValueError("expected a number, a colon and 64 hexadecimal digits")
        return cls(int(seq), hash.lower())


class VerificationResult(msgspec.Struct, frozen=True):
    """The result of a verification."""

    rows: int
    head: ChainPosition
    broken_at: int | None = None  # number of the first wrong row
    why: str = ""

    @property
    def good(self) -> bool:
        return not self.why


def canonical_json(value: Any) -> str:
    """Encode a value with sorted keys, so that equal values give equal text."""
    return msgspec.json.encode(value, order="sorted").decode()


def seal(before: ChainPosition, entry: AuditEntry) -> AuditRow:
    """Append an entry after `before`, with all key secrets hidden."""
    seq = before.seq + 1
    body = hidden(canonical_json({"seq": seq, **msgspec.structs.asdict(entry)}))
    return AuditRow(seq, body, _hash(before.hash, body))


def pruning_entry(last: ChainPosition, *, at: int, removed: int, why: str) -> AuditEntry:
    """Build the entry that records a pruning up to `last`."""
    after = {"through": last.seq, "hash": last.hash, "removed": removed}
    return AuditEntry(at=at, who=SELF, what=PRUNE, target="audit", reason=why, after=after)


def audit_row_json(row: AuditRow) -> dict[str, Any]:
    """Return a row as JSON: the entry's fields and the hash."""
    return {**msgspec.json.decode(row.body), "hash": row.hash}


def parse_audit_row(json: Mapping[str, Any]) -> AuditRow:
    """Parse the JSON of a row; raise ValueError if it is not one."""
    fields = dict(json)
    seq, hash = fields.get("seq"), fields.pop("hash", None)
    if not isinstance(seq, int) or not isinstance(hash, str):
        raise ValueError("expected a row with a number and a hash")
    return AuditRow(seq, canonical_json(fields), hash)


def _hash(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()


class ChainVerifier:
    """Verifies a chain row by row, from its first row."""

    def __init__(self, anchor: ChainPosition, *, noted: ChainPosition | None = None) -> None:
        """`anchor`: the last pruned row, which an entry of the chain must confirm. `noted`: an earlier head, kept
        elsewhere."""
        self._anchor = anchor
        self._noted = noted
        self._position = anchor
        self._anchored = anchor == ChainPosition()
        self._rows = 0
        self._broken: tuple[int | None, str] | None = None
        if noted is not None and noted.seq <= anchor.seq and noted != anchor:
            self._broken = (None, f"row {noted.seq} of the given head has been pruned")

    def add(self, row: AuditRow) -> None:
        if self._broken is None:
            self._rows += 1
            why = self._check_row(row)
            if why:
                self._broken = (row.seq, why)
            self._position = ChainPosition(row.seq, row.hash)

    def _check_row(self, row: AuditRow) -> str:
        """Return why the row is wrong; empty if it is right."""
        if row.seq != self._position.seq + 1:
            return f"row {self._position.seq + 1} is missing"
        if row.hash != _hash(self._position.hash, row.body):
            return f"row {row.seq} was changed or moved"
        if self._noted is not None and row.seq == self._noted.seq and row.hash != self._noted.hash:
            return f"row {row.seq} differs from the given head: the chain was rebuilt"
        try:
            entry = msgspec.json.decode(row.body, type=_Pruned)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return f"row {row.seq} cannot be read"
        if entry.what == PRUNE and entry.after is not None:
            pruned = (entry.after.get("through"), entry.after.get("hash"))
            self._anchored = self._anchored or pruned == (self._anchor.seq, self._anchor.hash)
        return ""

    def end(self, head: ChainPosition) -> VerificationResult:
        """Finish the verification. `head`: the end of the chain according to the store."""
        if self._broken is None:
            why = self._at_end(head)
            if why:
                self._broken = (None, why)
        broken_at, why = self._broken or (None, "")
        return VerificationResult(self._rows, self._position, broken_at, why)

    def _at_end(self, head: ChainPosition) -> str:
        if self._position != head:
            return f"the chain ends at row {self._position.seq}, but the store says {head.seq}"
        if not self._anchored:
            return f"rows up to {self._anchor.seq} are missing without an entry that they were pruned"
        if self._noted is not None and self._noted.seq > head.seq:
            return f"row {self._noted.seq} of the given head is missing: the chain was cut off"
        return ""


class _Pruned(msgspec.Struct):
    what: str
    after: dict[str, Any] | None = None
