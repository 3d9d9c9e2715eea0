"""What a step's batch says of images: their features, the spans that their tokens see and the places of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.engine.interface.image_rows import ImageRows
from headrace.engine.scheduling.step_plan import Share

Int32s = NDArray[np.int32]


def image_features(
    shares: list[Share], rows: int, feature_size: int
) -> tuple[NDArray[np.float32] | None, Int32s | None]:
    """Return the features of images whose tokens the step computes, and which row begins with which of them."""
    found: list[NDArray[np.float32]] = []
    places: Int32s | None = None
    known = 0
    for row, start, stop, image in _computed_images(shares):
        if places is None:
            places = np.full(rows, -1, dtype=np.int32)
        places[row : row + stop - start] = range(known, known + stop - start)
        data = np.frombuffer(image.data, dtype="<f4").reshape(image.count, feature_size)
        found.append(data[start - image.start : stop - image.start])
        known += stop - start
    return (np.concatenate(found), places) if found else (None, None)


def image_spans(shares: list[Share], rows: int) -> Int32s | None:
    """Return the first token and the end of the image that each row is in. A row in none is a span of its own. None if
    no row is in an image."""
    spans: Int32s | None = None
    for row, start, stop, image in _computed_images(shares):
        if spans is None:
            positions = np.concatenate([_positions(share) for share in shares])
            spans = np.stack([positions, positions + 1], axis=1)
        spans[row : row + stop - start] = image.start, image.end
    return spans


def token_places(shares: list[Share]) -> Int32s | None:
    """Return the three numbers by which the ropes turn each row: its position three times, unless there are images
    before it or it is in one. None if no sequence has images."""
    if not any(share.sequence.request.images for share in shares):
        return None
    return np.concatenate([places_of(share.sequence.request.images, _positions(share)) for share in shares])


def places_of(images: Sequence[ImageRows], positions: Int32s) -> Int32s:
    """Return the places of consecutive tokens of a sequence, [tokens, 3].

    An image's tokens have one time and their row and column, all of them after the text before the image; the text
    after it goes on behind the largest of these numbers.
    """
    places = np.repeat(positions[:, None], 3, axis=1)
    first, last = int(positions[0]), int(positions[-1]) + 1
    shift = 0  # by which the places of text are below its positions
    for image in images:
        if image.start >= last or image.grid is None:
            break
        rows, columns = image.grid
        start, stop = max(image.start, first), min(image.end, last)
        if start < stop:
            inside = np.arange(start, stop, dtype=np.int32) - image.start
            base = image.start - shift
            shown = places[start - first : stop - first]
            shown[:, 0] = base
            shown[:, 1] = base + inside // columns
            shown[:, 2] = base + inside % columns
        shift += image.count - max(rows, columns)
        after = max(image.end, first) - first
        places[after:] = positions[after:, None] - shift
    return places


def _positions(share: Share) -> Int32s:
    computed = share.sequence.computed
    return np.arange(computed, computed + share.count, dtype=np.int32)


def _computed_images(shares: list[Share]) -> Iterator[tuple[int, int, int, ImageRows]]:
    """Yield the parts of images that the step computes: first row, first and last token, image."""
    first = 0
    for share in shares:
        computed = share.sequence.computed
        for image in share.sequence.request.images:
            start, stop = max(image.start, computed), min(image.end, computed + share.count)
            if start < stop:
                yield first + start - computed, start, stop, image
        first += share.count
