"""One concrete way to serve a model: its weights, their precision, the KV memory, and the engine's bounds.

Owns Variant, which is data only and crosses to the worker process as JSON. `engine.interface.variant_check` checks one,
`engine.process.open_engine` opens one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.surfaces import SurfaceOptions

DEFAULT_MODEL = "mini"  # bundled


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

    @property
    def name(self) -> str:
        """Streams continue, byte for byte, only among workers whose names are equal."""
        group = "" if self.group is None else f"-g{self.group}"
        kept = "".join(f"+{rule}" for rule in self.keep)
        isa = "" if self.isa is None else f"/{self.isa}"
        return f"{self.weights}{group}{kept}/kv-{self.kv}{isa}"
