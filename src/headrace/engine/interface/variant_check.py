"""Checks a variant without opening its model."""

from __future__ import annotations

from typing import Final

from headrace.errors import RequestError
from headrace.models.precision import AUTOS, check_image_weights, parse_kv_type, parse_plan, parse_precision
from headrace.surfaces import surfaces_with
from headrace.variant import KV_BLOCKS, Variant

MOST_ROWS: Final = 65_536  # of a step, as the core allows
SPECULATION: Final = ("none", "ngram", "model", "self", "heads", "mtp")

BATCH_MODES: Final = ("gaps", "throughput")


def check_variant(variant: Variant) -> None:
    """Raise RequestError for options that no model and no machine could serve."""
    parse_plan(variant.weights, group=variant.group, keep=variant.keep)
    parse_kv_type(variant.kv)
    check_kv_block(variant.kv_block)
    if variant.speculation not in SPECULATION:
        raise RequestError(
            f"'speculation' must be one of {', '.join(SPECULATION)}, not '{variant.speculation}'.",
            parameter="speculation",
        )
    if (variant.speculation == "model") != (variant.draft_model is not None):
        raise RequestError(
            "'draft_model' requires speculation 'model', and speculation 'model' requires 'draft_model'.",
            parameter="draft_model",
        )
    if (variant.speculation == "heads") != (variant.draft_heads is not None):
        raise RequestError(
            "'draft_heads' requires speculation 'heads', and speculation 'heads' requires 'draft_heads'.",
            parameter="draft_heads",
        )
    if variant.speculation == "self" and not variant.skip_layers and variant.draft_weights is None:
        raise RequestError(
            "Speculation 'self' requires 'skip_layers', 'draft_weights' or both: what makes the draft cheaper.",
            parameter="skip_layers",
        )
    if variant.skip_layers and variant.speculation != "self":
        raise RequestError("'skip_layers' requires speculation 'self'.", parameter="skip_layers")
    if variant.draft_weights is not None and variant.draft_weights not in AUTOS:
        parse_precision(variant.draft_weights, parameter="draft_weights")
    check_image_weights(variant.image_weights)
    for name in ("threads", "context", "kv_tokens", "max_rows", "queued_sequences", "most_drafts", "image_patches"):
        value = getattr(variant, name)
        if value is not None and value < 1:
            raise RequestError(f"'{name}' must be at least 1, not {value}.", parameter=name)
    if variant.max_rows > MOST_ROWS:
        raise RequestError(f"'max_rows' must be 1 to {MOST_ROWS}, not {variant.max_rows}.", parameter="max_rows")
    if not 1 <= variant.max_sequences <= 4096:
        raise RequestError(
            f"'max_sequences' must be 1 to 4096, not {variant.max_sequences}.", parameter="max_sequences"
        )
    if variant.batch_mode not in BATCH_MODES:
        raise RequestError(
            f"'batch_mode' must be one of {', '.join(BATCH_MODES)}, not '{variant.batch_mode}'.", parameter="batch_mode"
        )
    _check_tiers(variant)
    surfaces_with(variant.surfaces)


def check_kv_block(tokens: int) -> None:
    if tokens not in KV_BLOCKS:
        raise RequestError(
            f"'kv_block' must be one of {', '.join(map(str, KV_BLOCKS))} tokens, not {tokens}. The kernels read "
            f"{KV_BLOCKS[0]} tokens of KV at once, so a block is a multiple of that.",
            parameter="kv_block",
        )


def _check_tiers(variant: Variant) -> None:
    for name in ("kv_memory_bytes", "kv_disk_bytes", "adapter_memory_bytes", "image_memory_bytes"):
        if getattr(variant, name) < 0:
            raise RequestError(f"'{name}' must be at least 0, not {getattr(variant, name)}.", parameter=name)
    if bool(variant.kv_disk_bytes) != (variant.kv_disk_folder is not None):
        raise RequestError(
            "'kv_disk_bytes' requires 'kv_disk_folder', and 'kv_disk_folder' requires 'kv_disk_bytes'.",
            parameter="kv_disk_folder",
        )
    if variant.kv_disk_key_env is not None and not variant.kv_disk_bytes:
        raise RequestError("'kv_disk_key_env' requires 'kv_disk_bytes'.", parameter="kv_disk_key_env")
