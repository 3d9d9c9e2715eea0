"""Packs the weights of variants into the cache folder before a server needs them, as its first start would, and writes
the indexes of large tokenizers.

Knows which weights a variant loads: its own, its draft model's or prediction module's and those of its image part.
Draft heads are small, and are packed at each start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

import headrace._core as _core
from headrace.errors import HeadraceError, InsufficientMemoryError, ModelError, RequestError
from headrace.models.model_folder import ModelFolder, find_model, open_model, with_expanded_kv
from headrace.models.own_module import own_module
from headrace.models.packing import is_packed, packed_file, packed_size, write_packed
from headrace.models.precision import WeightPlan
from headrace.models.vision.vision_folder import has_vision, open_vision
from headrace.models.weight_cache import cache_limit, configured_limit
from headrace.models.weight_choice import choose_plan
from headrace.variant import Variant

_MORE_ROOM: Final = "Free disk space, or set HEADRACE_CACHE to a folder on a larger disk."


class PackedWeights(msgspec.Struct, frozen=True):
    """Weights in the cache folder, or that a start would put there."""

    model: str
    weights: str  # their precision
    path: str
    bytes: int
    state: str  # "packed" now, "there" already, "missing", or "unread" of an image part that a server does not read
    reason: str = ""  # why it is unread


class _Wanted(msgspec.Struct, frozen=True):
    folder: ModelFolder
    plan: WeightPlan
    path: Path
    bytes: int

    def described(self, model: str, state: str) -> PackedWeights:
        return PackedWeights(model, self.plan.name, str(self.path), self.bytes, state)


def pack_ahead(
    variants: Iterable[Variant],
    cache: Path,
    *,
    threads: int,
    check: bool = False,
    progress: Callable[[str, int, int], None] = lambda model, done, total: None,
) -> Iterator[PackedWeights]:
    """Yield the weights of each variant once they are in the cache. `check`: pack nothing, and say what is missing.
    Image parts that a server would not read, and serve text, come first.

    RequestError if the cache may not hold them all, OSError if it cannot be written.
    """
    wanted: dict[Path, tuple[str, _Wanted]] = {}
    unread: dict[str, PackedWeights] = {}
    for variant in variants:
        if not check:
            _write_index(variant, cache)
        for each in _weights_of(variant, cache):
            if isinstance(each, PackedWeights):
                unread.setdefault(each.path, each)
            else:
                wanted.setdefault(each.path, (each.folder.path.name, each))
    total = sum(each.bytes for _, each in wanted.values())
    limit = cache_limit(cache / "packed")
    if total > limit and not check:
        raise RequestError(
            f"The packed weights take {total / 2**30:.2f} GiB, and the cache may hold {limit / 2**30:.2f} GiB. "
            f"{'Raise HEADRACE_CACHE_GIB.' if total > configured_limit() else _MORE_ROOM}",
            parameter="HEADRACE_CACHE_GIB",
        )
    yield from unread.values()
    pool = _core.Pool(threads)
    for path, (model, each) in wanted.items():
        if is_packed(path):
            yield each.described(model, "there")
        elif check:
            yield each.described(model, "missing")
        else:
            if not write_packed(each.folder, each.plan, pool, path, partial(progress, model)):
                raise InsufficientMemoryError(f"{path.parent} has no room for {model}. {_MORE_ROOM}")
            yield each.described(model, "packed")


def _write_index(variant: Variant, cache: Path) -> None:
    folder = open_model(find_model(variant.model))
    folder.tokenizer_cache = cache
    with contextlib.suppress(HeadraceError):  # a start reports what is wrong
        _ = folder.tokenizer


def _weights_of(variant: Variant, cache: Path) -> Iterator[_Wanted | PackedWeights]:
    if not variant.cache:
        raise RequestError(f"'{variant.model}' has cache = false, so no start would find its packed weights.")
    folder = open_model(find_model(variant.model))
    if not variant.latent_kv:
        folder = with_expanded_kv(folder)
    yield _wanted(folder, choose_plan(folder, variant.weights, group=variant.group, keep=variant.keep), cache)
    if variant.speculation == "self" and variant.draft_weights is not None:
        yield _wanted(folder, choose_plan(folder, variant.draft_weights), cache)
    if variant.speculation == "model" and variant.draft_model is not None:
        small = open_model(find_model(variant.draft_model))
        yield _wanted(small, choose_plan(small, variant.draft_weights or variant.weights), cache)
    module = own_module(folder, variant)
    if module is not None:
        yield _wanted(module.folder, module.plan, cache)
    if not has_vision(folder.path):
        return
    try:
        vision = open_vision(folder.path)
    except ModelError as error:
        yield PackedWeights(folder.path.name, variant.image_weights, str(folder.path), 0, "unread", str(error))
        return
    yield _wanted(vision.folder, vision.plan(variant.image_weights), cache)


def _wanted(folder: ModelFolder, plan: WeightPlan, cache: Path) -> _Wanted:
    return _Wanted(folder, plan, packed_file(folder, plan, cache), packed_size(folder.spec, folder.shapes, plan))
