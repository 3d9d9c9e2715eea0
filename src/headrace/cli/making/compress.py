"""`headrace compress`: make a model smaller, measure what that costs, and write it with a model card.

Maps flags to a recipe and to the texts for calibration and measurement, shows progress and prints tables.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from headrace.bench.evaluation.documents import Document, read_documents
from headrace.bench.evaluation.evaluation import (
    EvaluationProgress,
)
from headrace.cli.evaluate import EvaluationBar
from headrace.cli.making.calibration_memory import check_memory
from headrace.cli.making.calibration_text import calibration_sequences, split_documents
from headrace.cli.making.compress_format import (
    check_format,
    default_format,
    gguf_recipe,
    nested_recipe,
    plain_recipe,
    sparse_recipe,
)
from headrace.cli.making.compress_target import parse_target, planned
from headrace.cli.making.made_model import measure_made
from headrace.compress.calibration import BUNDLED_TEXT
from headrace.compress.compressed_folder import folder_bytes
from headrace.compress.compression import (
    LayerProgress,
    check_model,
    compress_model,
    memory_needed,
    products_of,
    scale_type,
)
from headrace.compress.model_card import bits_per_weight, describe_recipe, write_card
from headrace.compress.pruning import PRUNERS
from headrace.compress.recipe import BITS, GROUPS, KEPT, Recipe, check_method
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder, find_model, open_model
from headrace.models.precision import parse_group

_WIDTH_OF: Final = {"nf4": "NF4 has 4 bits", "fp8": "FP8 has 8 bits"}


def compress(
    model: str,
    out: Path,
    /,
    *,
    method: str = "awq+gptq",
    bits: float | None = None,
    target_size: str | None = None,
    max_kl: float | None = None,
    group: str | None = None,
    symmetric: bool | None = None,
    block_type: str | None = None,
    double_quant: bool = False,
    sparsity: str | None = None,
    pruner: str | None = None,
    keep: Annotated[list[str] | None, Parameter(negative=())] = None,
    clip: bool = True,
    act_order: bool = True,
    format: str | None = None,
    calibrate: Path | None = None,
    calibrate_tokens: int = 16384,
    window: int | None = None,
    measure: Path | None = None,
    measure_tokens: int = 10000,
    quality: bool = True,
    speed: bool = True,
    restart: bool = False,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
) -> None:
    """Make a model smaller and measure what that costs.

    Usage: headrace compress path/to/model path/to/smaller --bits 4 --calibrate prompts.jsonl

    Writes a folder, or a GGUF file if OUT ends with .gguf, that Headrace serves and that other engines read. The recipe
    and the measured quality are in its README, or in OUT.md beside a file. A command that was killed continues where it
    was when you repeat it.

    Parameters
    ----------
    model
        Model folder, bundled model (mini, draft) or hub id (owner/name, with the extra `hub`).
    out
        Folder or .gguf file to write. It must not exist.
    method
        rtn (round to nearest), gptq, awq, awq+gptq, smoothquant (weights and activations in int8), smoothquant+gptq,
        nf4, nf4+gptq, fp8 (E4M3, 8 bits) or fp8+gptq.
    bits
        Bits of each weight in the layers' products, 2 to 8. Embedding, head and norms stay as they are. A fraction,
        such as 4.5, is a mean with scales: each product gets the bits that its measured effect deserves. Default: 4;
        8 for smoothquant and fp8.
    target_size
        Size of the weight files, such as 80MB. Each product gets the bits that its measured effect deserves.
    max_kl
        Bound of the KL divergence from the original that the plan expects, such as 0.02. Products get few bits where
        that costs little.
    group
        Inputs that share a scale: 128, 64, 32 or channel. Default: the largest that divides every row, or channel for
        smoothquant and fp8.
    symmetric
        Store no zero for each group. Default: only for 8 bits. In a GGUF file: Q4_0 for 4 bits.
    block_type
        Q8_0, Q6_K, Q4_K, Q4_1 or Q4_0, for a GGUF file. Default: by --bits 8, 6 or 4: Q8_0, Q6_K and Q4_K; where a row
        is no multiple of 256 weights, Q8_0 and Q4_1.
    double_quant
        Round the magnitudes of NF4's blocks to 8 bits too: 4.13 bits per weight and not 4.5.
    sparsity
        Set weights of the layers' products to 0: a share such as 0.5, or 2:4 for two of every four neighbours. Without
        --bits the others are not rounded.
    pruner
        How --sparsity chooses: sparsegpt (the default; it corrects the weights that stay), wanda or magnitude.
    keep
        PATTERN=BITS for products whose names match, such as "layers.0.*=8"; 16 keeps them as they are, without zeros
        too. Repeatable.
    clip
        Search for the part of each group's range that rounds best.
    act_order
        Let gptq round the columns with the largest inputs first.
    format
        compressed-tensors, bitsandbytes (NF4 only), gguf, dense, or sparse-bitmask (zeros are not stored). Default: the
        one that holds the method's codes, gguf if OUT ends with .gguf, dense if nothing is rounded.
    calibrate
        Text file, or JSONL file of prompts as `headrace evaluate` reads them, that is like what the model will read.
        Default: a bundled English text about software.
    calibrate_tokens
        Calibrate on at most this many tokens.
    window
        Tokens of a calibration sequence. Default: 512, or the model's context if that is shorter.
    measure
        Text or JSONL file to measure the result on. Default: a tenth of the calibration text, which is not calibrated
        on.
    measure_tokens
        Measure on at most this many tokens.
    quality
        Measure the result against the original.
    speed
        Measure the speed of both too.
    restart
        Begin again, though OUT.partial has finished layers.
    threads
        Threads for the measurement. Default: the machine's cores.
    """
    folder = open_model(find_model(model))
    target = parse_target(bits, target_size, max_kl)
    uniform = None if target is not None or bits is None else int(bits)
    if (out.suffix == ".gguf") != (format == "gguf") and (format is not None or out.suffix == ".gguf"):
        if format is not None:
            raise RequestError(
                f"{out.name} does not fit --format {format}. A GGUF file ends with .gguf.", parameter="out"
            )
        format = "gguf"
    recipe = _recipe(
        folder, check_method(method), uniform, group, symmetric, keep or [], clip=clip, act_order=act_order
    )
    if double_quant:
        recipe = nested_recipe(recipe)
    if sparsity is not None:
        rounds = bits is not None or target is not None
        recipe = sparse_recipe(recipe, sparsity, pruner or PRUNERS[0], keep or [], rounds=rounds)
    elif pruner is not None:
        raise RequestError("--pruner is for --sparsity. Pass --sparsity 0.5 or 2:4 too.", parameter="pruner")
    kind = format or default_format(recipe)
    check_format(kind, recipe)
    recipe = gguf_recipe(recipe, block_type, target) if kind == "gguf" else plain_recipe(recipe, block_type)
    check_model(folder, recipe)
    source = calibrate or BUNDLED_TEXT
    documents = read_documents(source)
    held_out: list[Document] = []
    if measure is None:
        documents, held_out = split_documents(documents)
    else:
        held_out = read_documents(measure)
    sequences = calibration_sequences(folder, documents, window, calibrate_tokens)
    counted = sum(len(sequence) for sequence in sequences)
    name = "the bundled text" if calibrate is None else source.name
    check_memory(
        f"Compressing {folder.path.name}",
        sequences,
        lambda tokens, longest: memory_needed(folder.spec, tokens, longest, recipe),
    )
    if target is not None:
        if recipe.kind != "integer":
            raise RequestError(f"{_WIDTH_OF[recipe.kind]}. Choose another method for a mixed plan.", parameter="method")
        with EvaluationBar() as bar:
            recipe = planned(folder, sequences, recipe, target, lambda done, total: bar.show(_sensing(done, total)))
    with EvaluationBar() as bar:

        def watch(state: LayerProgress) -> None:
            bar.show(EvaluationProgress(state.doing, state.done, state.total))

        compressed = compress_model(folder, out, sequences, recipe, format=kind, restart=restart, watch=watch)
    if compressed.resumed:
        print(f"Continued after layer {compressed.resumed}.", file=sys.stderr)
    table = ""
    if quality:
        where = measure.name if measure else f"a tenth of {name}"
        table = measure_made(
            model, compressed.folder, held_out, where, speed=speed, tokens=measure_tokens, threads=threads
        )
    calibration = f"{counted:,} tokens of {name}" if recipe.calibrates else "none"
    write_card(
        compressed.folder,
        folder,
        recipe,
        compressed.products,
        format=kind,
        calibration=calibration,
        quality=table,
    )
    smaller = folder_bytes(compressed.folder)
    compressed.publish(out)
    print(
        f"{out}: {describe_recipe(recipe)}, {bits_per_weight(folder, recipe):.2f} bits per weight in the layers. "
        f"Weight files {folder.weights.total_bytes / 1e6:,.1f} MB before, {smaller / 1e6:,.1f} MB after."
    )


def _sensing(done: int, total: int) -> EvaluationProgress:
    return EvaluationProgress("sensitivity", done, total)


def _recipe(
    folder: ModelFolder,
    method: str,
    bits: int | None,
    group: str | None,
    symmetric: bool | None,
    keep: Sequence[str],
    *,
    clip: bool,
    act_order: bool,
) -> Recipe:
    wide = method.startswith(("smoothquant", "fp8"))  # by rows, in 8 bits
    chosen = (8 if wide else 4) if bits is None else bits
    if chosen not in BITS:
        raise RequestError(f"'bits' must be 2 to 8, not {chosen}.", parameter="bits")
    if method.startswith("nf4") and chosen != 4:
        raise RequestError(f"NF4 has 4 bits, not {chosen}. Choose another method or remove --bits.", parameter="bits")
    if method.startswith("fp8") and chosen != 8:
        raise RequestError(f"FP8 has 8 bits, not {chosen}. Choose another method or remove --bits.", parameter="bits")
    names = products_of(folder)
    each = dict.fromkeys(names, chosen)
    for entry in keep:
        pattern, equals, kept = entry.rpartition("=")
        if not equals or not kept.isdigit() or (int(kept) not in BITS and int(kept) != KEPT):
            raise RequestError(f"Invalid entry '{entry}'. Expected PATTERN=BITS, 2 to 8 or 16.", parameter="keep")
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise RequestError(
                f"--keep pattern '{pattern}' matches no product. Names look like {', '.join(names[:4])}.",
                parameter="keep",
            )
        each.update(dict.fromkeys(matched, int(kept)))
    return Recipe(
        method=method,
        group=_group(folder, names) if group is None and not wide else parse_group(group or "channel"),
        symmetric=(chosen == 8) if symmetric is None else symmetric,
        clip=clip,
        act_order=act_order,
        scale_type=scale_type(folder),
        bits=each,
    )


def _group(folder: ModelFolder, names: Sequence[str]) -> int:
    """Return the largest group that divides the rows of every product; 0 if there is none."""
    return next((size for size in GROUPS if all(folder.shapes[name][1] % size == 0 for name in names)), 0)
