"""The log of what was changed, by whom: a chain of rows in which each has the hash of all before it.

    row n:   body = {"seq": n, "at": ..., "who": ..., "what": ..., "before": ..., "after": ...}
             hash = SHA-256(hash of row n-1, newline, body)

Owns the form of an entry, the sealing of one onto the chain, and the verification of a chain. A row that was changed,
removed from the middle or put between two others breaks the chain from there on. Whoever can write to the storage could
still cut off its end or make all of it anew: against that, note its head (number and hash) elsewhere and verify
against it; the server's log has the head of every change.

The oldest rows go when there are too many or they are too old. What is removed is itself an entry of the chain, with
the number and the hash of the last row that went, so that the rest is verified from there. Knows no storage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.gateway.accounts.key_secrets import hidden

ZERO: Final = "0" * 64
PRUNE: Final = "audit.prune"
SELF: Final = "headrace"  # who, where it was nobody else


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change."""

    at: int  # seconds since 1970, as the machine's clock had it
    who: str  # the key's id, or "local"
    what: str  # such as key.create
    target: str = ""  # such as key:key_0123456789abcdef
    tenant: str = ""
    request: str = ""
    reason: str = ""
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class AuditRow(msgspec.Struct, frozen=True):
    """An entry on the chain."""

    seq: int
    body: str  # canonical JSON
    hash: str


class ChainPosition(msgspec.Struct, frozen=True):
    """A place of the chain: its head, or the last row that was removed from its beginning."""

    seq: int = 0
    hash: str = ZERO

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"

    @classmethod
    def read(cls, text: str) -> ChainPosition:
        """ValueError where it is none."""
        seq, _, hash = text.partition(":")
        if not (seq.isascii() and seq.isdigit() and len(seq) < 19 and len(hash) == 64):
            raise ValueError("expected a number, a colon and 64 hexadecimal digits")
        return cls(int(seq), hash.lower())


class VerificationResult(msgspec.Struct, frozen=True):
    """What verification found."""

    rows: int
    head: ChainPosition
    broken_at: int | None = None  # the first row that does not belong where it is
    why: str = ""

    @property
    def good(self) -> bool:
        return not self.why


def canonical_json(value: Any) -> str:
    """The same text for the same value, whoever writes it."""
    return msgspec.json.encode(value, order="sorted").decode()


def seal(before: ChainPosition, entry: AuditEntry) -> AuditRow:
    """Whatever stands in the entry, no secret of a key gets onto the chain."""
    seq = before.seq + 1
    body = hidden(canonical_json({"seq": seq, **msgspec.structs.asdict(entry)}))
    return AuditRow(seq, body, _hash(before.hash, body))


def pruning_entry(last: ChainPosition, *, at: int, removed: int, why: str) -> AuditEntry:
    """That the rows up to `last` are gone."""
    after = {"through": last.seq, "hash": last.hash, "removed": removed}
    return AuditEntry(at=at, who=SELF, what=PRUNE, target="audit", reason=why, after=after)


def audit_row_json(row: AuditRow) -> dict[str, Any]:
    """A row as it is shown: the entry's own fields, and the hash."""
    return {**msgspec.json.decode(row.body), "hash": row.hash}


def parse_audit_row(shown: Mapping[str, Any]) -> AuditRow:
    """The row that was shown so. ValueError where it cannot be one."""
    fields = dict(shown)
    seq, hash = fields.get("seq"), fields.pop("hash", None)
    if not isinstance(seq, int) or not isinstance(hash, str):
        raise ValueError("a row has a number and a hash")
    return AuditRow(seq, canonical_json(fields), hash)


def _hash(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()


class ChainVerifier:
    """Follows a chain from where it begins, row by row."""

    def __init__(self, anchor: ChainPosition, *, noted: ChainPosition | None = None) -> None:
        """`anchor`: the last row that was removed, which a row of the chain must say; `noted`: a head of an earlier
        time, kept elsewhere."""
        self._anchor = anchor
        self._noted = noted
        self._mark = anchor
        self._anchored = anchor == ChainPosition()
        self._rows = 0
        self._broken: tuple[int | None, str] | None = None
        if noted is not None and noted.seq <= anchor.seq and noted != anchor:
            self._broken = (None, f"row {noted.seq}, which was noted, is no longer kept")

    def add(self, row: AuditRow) -> None:
        if self._broken is None:
            self._rows += 1
            why = self._against(row)
            if why:
                self._broken = (row.seq, why)
            self._mark = ChainPosition(row.seq, row.hash)

    def _against(self, row: AuditRow) -> str:
        """Why the row does not belong here; empty where it does."""
        if row.seq != self._mark.seq + 1:
            return f"row {self._mark.seq + 1} is missing"
        if row.hash != _hash(self._mark.hash, row.body):
            return f"row {row.seq} is not what was written, or not where it was written"
        if self._noted is not None and row.seq == self._noted.seq and row.hash != self._noted.hash:
            return f"row {row.seq} is not the one that was noted: the chain was made anew"
        try:
            entry = msgspec.json.decode(row.body, type=_Pruned)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return f"row {row.seq} cannot be read"
        if entry.what == PRUNE and entry.after is not None:
            said = (entry.after.get("through"), entry.after.get("hash"))
            self._anchored = self._anchored or said == (self._anchor.seq, self._anchor.hash)
        return ""

    def end(self, head: ChainPosition) -> VerificationResult:
        """`head`: where the storage says that the chain ends."""
        if self._broken is None:
            why = self._at_end(head)
            if why:
                self._broken = (None, why)
        broken_at, why = self._broken or (None, "")
        return VerificationResult(self._rows, self._mark, broken_at, why)

    def _at_end(self, head: ChainPosition) -> str:
        if self._mark != head:
            return f"the chain ends at row {self._mark.seq}, and the storage says {head.seq}"
        if not self._anchored:
            return f"rows up to {self._anchor.seq} are missing, and no row says that they were removed"
        if self._noted is not None and self._noted.seq > head.seq:
            return f"row {self._noted.seq}, which was noted, is not there: the chain's end was cut off"
        return ""


class _Pruned(msgspec.Struct):
    what: str
    after: dict[str, Any] | None = None
