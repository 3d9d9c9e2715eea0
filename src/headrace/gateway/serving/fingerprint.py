"""Fingerprints of variants: the `system_fingerprint` of responses, and a part of cache keys.

A fingerprint covers everything that determines answers. Names and times of files do not count: the same model in
another folder, or in other shards, has the same fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from headrace.config.upstream_section import UpstreamConfig, features_of
from headrace.models.model_folder import ModelFolder
from headrace.models.precision import AUTO
from headrace.models.vision.image_part_digest import read_digest
from headrace.models.weight_samples import named, samples, unreadable
from headrace.variant import Variant

_DIGITS: Final = 10  # hexadecimal
# Files that loading a model reads beside its weights.
_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "additional_chat_templates/tool_use.jinja",
)


def of_model(folder: ModelFolder, variant: Variant, *, special_tokens: str = "none") -> str:
    """Return the fingerprint of weights at a precision. ModelError for files that cannot be read.

    `special_tokens`: the model's setting of this name.
    """
    parts = _of_model(folder, variant)
    return _fingerprint(parts if special_tokens == "none" else chain(parts, named("special", special_tokens.encode())))


def _of_model(folder: ModelFolder, variant: Variant) -> Iterator[bytes]:
    # What the other small files say (how an encoder pools) is in the spec.
    yield from named("variant", msgspec.msgpack.encode((variant.name, folder.spec)))
    if variant.image_weights != AUTO:
        yield from named("image_weights", variant.image_weights.encode())
    if variant.offsets_file is not None:
        yield from named("kv_offsets", _content(Path(variant.offsets_file).expanduser()))
    for name in _FILES:
        yield from named(name, _content(folder.path / name))
    yield from samples(folder.weights, {part.name for parts in folder.sources.values() for part in parts})
    image_part = read_digest(folder.path, variant)
    if image_part is not None:
        yield from named("image part", image_part)


def of_upstream(config: UpstreamConfig) -> str:
    """Return the fingerprint of an upstream as configured: its URL, the model name, and the fields it is sent.

    It leaves out the key and the values of headers, because clients see the fingerprint. Changes that the upstream's
    operators make do not change it. Of a managed engine, what determines its answers stands for the URL.
    """
    managed = config.managed
    if managed is not None:
        given = (managed.model, managed.quantisation, managed.kv_dtype, managed.adapters, managed.arguments)
        sent = (config.kind, "managed", msgspec.json.encode(given).decode(), config.model, features_of(config))
    else:
        address = urlsplit(config.url or "")
        sent = (config.kind, address.netloc.lower(), address.path.rstrip("/"), config.model, features_of(config))
    return _fingerprint(named("upstream", msgspec.msgpack.encode((sent, sorted(config.headers)))))


def _fingerprint(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"fp_{digest.hexdigest()[:_DIGITS]}"


def _content(path: Path) -> bytes:
    """Empty where there is no such file. The loading has found each small enough."""
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise unreadable(path, error) from None
