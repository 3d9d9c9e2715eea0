"""A variant: one way to serve a model (weights, precision, KV memory, engine bounds).

Data only; it crosses to the worker process as JSON. `engine.interface.variant_check` validates a variant and
`engine.process.open_engine` opens it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.surfaces import SurfaceOptions

DEFAULT_MODEL = "mini"  # bundled
DEFAULT_KV_BLOCK = 16
OFFSET_KV = ("int8", "int4")  # precisions of KV whose keys can have offsets
KV_BLOCKS = (16, 32, 64, 128)  # the kernels read 16 tokens at once


class Variant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    model: str  # a folder in Hugging Face layout, a GGUF file, or the name of a bundled or downloaded model
    weights: str = "auto"  # bf16, or what keeps the weights of a quantised file
    group: str | int | None = None
    keep: tuple[str, ...] = ()
    image_weights: str = "auto"  # of the image part: bf16 if the files hold it so, or else f32
    image_patches: int = 16384  # of one image that the image part computes in one step; larger ones are scaled down
    kv: str = "bf16"
    kv_offsets: str | None = None  # a file that `headrace kv-offsets` made, for kv int8 and int4; others leave it out
    latent_kv: bool = True  # False: keys and values of every head, in a model that computes them from a latent
    threads: int | None = None  # None: all of the machine's cores
    context: int | None = None  # tokens of one sequence
    kv_tokens: int | None = None  # tokens of all sequences together
    kv_block: int = DEFAULT_KV_BLOCK  # tokens of a block: the unit of paging and of prefix reuse
    max_rows: int = 512  # tokens of one step
    isa: str | None = None
    arithmetic: str | None = None  # "portable": the same bits on every machine
    cache: bool = True  # keep packed weights in the cache folder

    max_sequences: int = 64  # running at once
    queued_sequences: int = 4096  # waiting
    batch_mode: str = "gaps"  # "gaps": batch work fills what others leave; "throughput": the most tokens/s of batches
    prefix_cache: bool = True
    # "ngram", "none", "model": with draft_model, "heads": with draft_heads, "self": with skip_layers, or "mtp": with
    # the prediction module of the model's own checkpoint
    speculation: str = "ngram"
    draft_model: str | None = None
    draft_heads: str | None = None  # a folder of Medusa heads or of an EAGLE layer
    draft_weights: str | None = None  # None: as the model's weights; of heads: int8
    skip_layers: tuple[int, ...] = ()  # that the model leaves out when it drafts for itself
    most_drafts: int = 8  # draft tokens for one sequence in one step
    public_prefixes: tuple[tuple[int, ...], ...] = ()  # token ids that every tenant may share
    saved_prefixes: str | None = None  # a folder where pinned prefixes survive a restart
    kv_memory_bytes: int = 0  # of host memory for the KV of conversations that left the KV cache
    kv_disk_bytes: int = 0  # of disk for it, in `kv_disk_folder`
    kv_disk_folder: str | None = None
    kv_disk_key_env: str | None = None  # environment variable with the key that encrypts it
    adapter_memory_bytes: int = 1 << 30  # of adapters in memory; those that no request uses make room for others
    image_memory_bytes: int = 1 << 30  # of images' features in requests that run or wait
    surfaces: dict[str, SurfaceOptions] = {}  # changes to the default surfaces
    checks: bool = False  # check the block accounting whenever the engine is idle: for tests and debugging

    @classmethod
    def of(cls, model: str, **options: Any) -> Variant:
        """Build a variant from keyword arguments. Raise RequestError for an unknown option or a wrong type."""
        for name in options:
            if name not in cls.__struct_fields__:
                raise RequestError(f"Unknown option '{name}'.", parameter=name)
        try:
            return msgspec.convert({"model": str(model), **options}, cls)
        except msgspec.ValidationError as error:
            raise RequestError(str(error)) from None

    @property
    def offsets_file(self) -> str | None:
        """The file of what KV memory subtracts from keys; None if its precision has no use for it."""
        return self.kv_offsets if self.kv in OFFSET_KV else None

    @property
    def name(self) -> str:
        """A stream can continue, byte for byte, only on workers with the same name."""
        group = "" if self.group is None else f"-g{self.group}"
        kept = "".join(f"+{rule}" for rule in self.keep)
        isa = "" if self.isa is None else f"/{self.isa}"
        arithmetic = "" if self.arithmetic is None else f"/{self.arithmetic}"
        offsets = "" if self.offsets_file is None else "-offsets"
        latent = "" if self.latent_kv else "-expanded"
        return f"{self.weights}{group}{kept}/kv-{self.kv}{offsets}{latent}{isa}{arithmetic}"
