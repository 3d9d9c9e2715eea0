"""`headrace make-model`: a model directory with random weights in the shape of a public model.

Owns the command's flags and its closing line. The shapes and the writing are headrace.models.synthetic.random_model's.
"""

from __future__ import annotations

import time
from pathlib import Path

from headrace.models.synthetic.public_shapes import ShapeName
from headrace.models.synthetic.random_model import Dtype, write_random_model


def make_model(
    out: Path,
    /,
    *,
    like: ShapeName,
    seed: int = 0,
    dtype: Dtype = "bf16",
) -> None:
    """Make a model with random weights in the shape of a public one.

    The directory has the ordinary Hugging Face layout, with a working tokenizer of the public model's vocabulary size.
    The same name, seed and dtype give the same bytes everywhere. What such a model writes is noise.

    Parameters
    ----------
    out
        Directory to make; it must not exist yet, or be empty.
    like
        Public model whose shape to take.
    seed
        Seed of the weights.
    dtype
        Type in which the weights are stored.
    """
    started = time.monotonic()
    made = write_random_model(like, out, seed=seed, dtype=dtype)
    seconds = time.monotonic() - started
    files = "one file" if made.files == 1 else f"{made.files} files"
    print(
        f"{out}: {made.weights / 1e6:,.1f} million random weights in the shape of {like}, "
        f"{made.weight_bytes / 1e6:,.1f} MB of {dtype} in {files}, {seconds:.1f} s"
    )
