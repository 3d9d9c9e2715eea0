"""`headrace make-model`: create a model folder with random weights in the shape of a public model."""

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
    """Create a model with random weights in the shape of a public one.

    Usage: headrace make-model build/0.5b --like qwen2.5-0.5b

    The folder has the usual Hugging Face layout, with a working tokenizer of the public model's vocabulary size. Its
    speed and memory are those of the public model; its text is noise. The same name, seed and dtype give the same bytes
    on every machine.

    Parameters
    ----------
    out
        Folder to create. It must not exist yet, or be empty.
    like
        Public model whose shape is used.
    seed
        Seed of the weights.
    dtype
        Data type of the stored weights.
    """
    started = time.monotonic()
    made = write_random_model(like, out, seed=seed, dtype=dtype)
    seconds = time.monotonic() - started
    files = "one file" if made.files == 1 else f"{made.files} files"
    print(
        f"{out}: {made.weights / 1e6:,.1f} million random weights in the shape of {like}, "
        f"{made.weight_bytes / 1e6:,.1f} MB of {dtype} in {files}, {seconds:.1f} s"
    )
