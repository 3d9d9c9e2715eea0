"""Digest of a model's image part: of everything but the image that features depend on.

Weights are sampled as `weight_samples` says. The digest is the same in another folder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from headrace.errors import ModelError
from headrace.models.precision import WeightPlan
from headrace.models.vision.vision_folder import VisionFolder, has_vision, open_vision
from headrace.models.weight_samples import named, samples
from headrace.variant import Variant


def image_part_digest(vision: VisionFolder, plan: WeightPlan) -> bytes:
    """Return the digest of an image part whose products have the precision of a plan. ModelError for files that cannot
    be read."""
    digest = hashlib.sha256()
    described = msgspec.msgpack.encode((vision.tower, type(vision.layout).__name__, vision.layout, plan))
    for part in (*named("image part", described), *samples(vision.folder.weights, vision.tensor_names)):
        digest.update(part)
    return digest.digest()


def read_digest(path: Path, variant: Variant) -> bytes | None:
    """Return the digest of a model's image part as a variant computes it; None if Headrace reads no images with it."""
    try:
        if not has_vision(path):
            return None
        vision = open_vision(path).within(variant.image_patches)
        return image_part_digest(vision, vision.plan(variant.image_weights))
    except ModelError:
        return None  # the server says why when it opens the image part, and serves text
