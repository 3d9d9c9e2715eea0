"""Cuts the text that `headrace compress` and `headrace reshape` calibrate on, and holds out a part to measure on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.bench.evaluation.documents import Document, cut, tokenise
from headrace.bench.evaluation.evaluation import LEAST_WINDOW
from headrace.compress.calibration import HELD_OUT
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Return documents to calibrate and to measure on: every tenth is held out, or the last tenth of a text."""
    if len(documents) == 1:
        text = documents[0].prompt
        end = len(text) - len(text) // HELD_OUT
        if documents[0].messages or not text[end:].strip():
            return documents, documents
        return [Document(prompt=text[:end])], [Document(prompt=text[end:])]
    if len(documents) < HELD_OUT:
        return documents, documents
    held_out = documents[HELD_OUT - 1 :: HELD_OUT]
    return [each for number, each in enumerate(documents) if (number + 1) % HELD_OUT], held_out


def calibration_sequences(
    folder: ModelFolder, documents: Sequence[Document], window: int | None, most: int
) -> list[list[int]]:
    size = min(512, folder.spec.context) if window is None else window
    if not LEAST_WINDOW <= size <= folder.spec.context:
        raise RequestError(
            f"'window' must be {LEAST_WINDOW} to {folder.spec.context} tokens, the model's context, not {size}.",
            parameter="window",
        )
    if most < 1:
        raise RequestError(f"'calibrate_tokens' must be at least 1, not {most}.", parameter="calibrate_tokens")
    # All of a prompt is calibrated on, and not only what an evaluation scores.
    tokens = [msgspec.structs.replace(tokenise(document, folder.tokenizer), score_from=0) for document in documents]
    windows = cut(tokens, window=size, stride=size, most=most)
    if not windows:
        raise RequestError("The calibration text is too short: it has no two tokens.", parameter="calibrate")
    return [each.tokens for each in windows]
