"""One concrete way to serve a model: its weights, their precision, the KV memory, and the engine's bounds.

Owns Variant, which is data only and crosses to the worker process as JSON, and the checks that need no model. Opening
one is engine.opening's.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from millrace.engine.policy import SurfaceOptions, surfaces_with
from millrace.errors import RequestError
from millrace.models.precision import parse_kv, parse_plan, parse_precision

SPECULATION: Final = ("none", "ngram", "model")


class Variant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    model: str  # a folder in the Hugging Face layout, or a hub id
    weights: str = "bf16"
    group: str | int | None = None
    keep: tuple[str, ...] = ()
    kv: str = "bf16"
    threads: int | None = None  # the machine's cores where it is None
    context: int | None = None  # most tokens of one sequence
    kv_tokens: int | None = None  # of all sequences together
    max_rows: int = 512  # of a step
    isa: str | None = None
    cache: bool = True  # keep packed weights in the cache folder

    max_sequences: int = 64  # running at once
    queued_sequences: int = 4096  # waiting
    prefix_cache: bool = True
    speculation: str = "ngram"  # "ngram", "none", or "model": with draft_model
    draft_model: str | None = None
    draft_weights: str | None = None  # as the model's where it is None
    most_drafts: int = 8  # tokens proposed for a sequence in one step
    public_prefixes: tuple[tuple[int, ...], ...] = ()  # token ids that every tenant may share
    saved_prefixes: str | None = None  # a folder where pinned prefixes outlive the process
    surfaces: dict[str, SurfaceOptions] = {}  # what differs from the policy's own
    checks: bool = False  # look through the books whenever the engine is idle: for tests and debugging

    @classmethod
    def of(cls, model: str, **options: Any) -> Variant:
        """From keyword arguments; RequestError for one that is unknown or of a wrong type."""
        for name in options:
            if name not in cls.__struct_fields__:
                raise RequestError(f"there is no option '{name}'", parameter=name)
        try:
            return msgspec.convert({"model": str(model), **options}, cls)
        except msgspec.ValidationError as error:
            raise RequestError(str(error)) from None

    def check(self) -> None:
        """RequestError for what no model and no machine could serve."""
        parse_plan(self.weights, group=self.group, keep=self.keep)
        parse_kv(self.kv)
        if self.speculation not in SPECULATION:
            raise RequestError(
                f"speculation is one of {', '.join(SPECULATION)}, not '{self.speculation}'", parameter="speculation"
            )
        if (self.speculation == "model") != (self.draft_model is not None):
            raise RequestError(
                "a draft model goes with speculation 'model', and with no other", parameter="draft_model"
            )
        if self.draft_weights is not None:
            parse_precision(self.draft_weights, parameter="draft_weights")
        for name in ("threads", "context", "kv_tokens", "max_rows", "queued_sequences", "most_drafts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} must be at least 1, not {value}", parameter=name)
        if not 1 <= self.max_sequences <= 4096:
            raise RequestError(f"max_sequences must be 1 to 4096, not {self.max_sequences}", parameter="max_sequences")
        surfaces_with(self.surfaces)

    @property
    def name(self) -> str:
        """Streams continue, byte for byte, only among workers whose names are equal."""
        group = "" if self.group is None else f"-g{self.group}"
        kept = "".join(f"+{rule}" for rule in self.keep)
        isa = "" if self.isa is None else f"/{self.isa}"
        return f"{self.weights}{group}{kept}/kv-{self.kv}{isa}"
