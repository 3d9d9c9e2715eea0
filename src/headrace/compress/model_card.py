"""Writes the README of a compressed model: what was done to it, and what that costs by measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headrace.compress.compressed_folder import card_of, folder_bytes
from headrace.compress.pruning import STRUCTURED
from headrace.compress.recipe import KEPT, Recipe, SplitPlan
from headrace.compress.work_folder import ProductReport, SplitReport
from headrace.models.formats.atomic_file import new_file
from headrace.models.model_folder import ModelFolder


def write_card(
    model: Path,
    original: ModelFolder,
    recipe: Recipe,
    products: Sequence[ProductReport],
    *,
    format: str,
    calibration: str,
    quality: str = "",
) -> None:
    """Write the card into a model folder. `calibration` says on what, `quality` is a Markdown table."""
    with new_file(card_of(model)) as file:
        file.write(_card(model, original, recipe, products, format, calibration, quality).encode())


def write_split_card(
    model: Path,
    original: ModelFolder,
    plan: SplitPlan,
    reports: Sequence[SplitReport],
    *,
    calibration: str,
    quality: str = "",
) -> None:
    """Write the card of a dense model that was split into experts."""
    name = original.path.name
    lines = [
        f"---\nbase_model: {name}\ntags: [mixture-of-experts, headrace]\n---",
        f"# {model.name}",
        f"{name} split into experts with `headrace reshape`. Serve it with `headrace serve --model {model.name}`, or "
        "with any engine that runs Glm4MoeForCausalLM.",
        "## Recipe",
        f"| | |\n|---|---|\n| shared experts | {plan.shared} |\n| routed experts | {plan.routed}, of which a token "
        f"goes through {plan.active} |\n| neurons of an expert | {original.spec.intermediate_size // plan.parts} |\n"
        f"| active neurons | {plan.active_share:.1%} |\n| weight files | {original.weights.total_bytes / 1e6:,.1f} MB "
        f"before, {folder_bytes(model) / 1e6:,.1f} MB after |\n| calibration | {calibration} |",
    ]
    if quality:
        lines += ["## Quality", quality.strip()]
    lines += [
        "## Layers",
        "Sums of squares on calibration tokens that nothing was fitted to: what the routed experts add, relative to "
        "the outputs of the MLP; the part of it in the experts that the router chooses, and in those that add most; "
        "the error of the layer's outputs, relative to what it adds to its inputs.",
        "| layer | routed outputs, % | of them kept, % | best choice, % | error, % |\n|---:|---:|---:|---:|---:|\n"
        + "\n".join(
            f"| {each.layer} | {each.routed_size:.1%} | {each.kept:.1%} | {each.best:.1%} | {each.error:.1%} |".replace(
                "%", ""
            )
            for each in reports
        ),
    ]
    with new_file(card_of(model)) as file:
        file.write(("\n\n".join(lines) + "\n").encode())


def describe_recipe(recipe: Recipe) -> str:
    """Return the recipe in a line: "awq+gptq, 4 bits in groups of 128, asymmetric"."""
    if not recipe.sparsity:
        return _describe_rounding(recipe)
    share = recipe.sparsity if recipe.sparsity == STRUCTURED else f"{float(recipe.sparsity):.0%} zeros"
    described = f"{share} by {recipe.pruner}"
    return f"{described}, then {_describe_rounding(recipe)}" if recipe.rounds else described


def _describe_rounding(recipe: Recipe) -> str:
    bits = Counter(bits for bits in recipe.bits.values() if bits < KEPT)
    spec = recipe.grid(4)
    if spec.kind == "nf4":
        return f"{recipe.method}, blocks of {spec.group}{' with double quantisation' if recipe.nested else ''}"
    if spec.kind == "fp8":
        return f"{recipe.method}, E4M3 with a scale per output"
    spelled = " and ".join(str(each) for each in sorted(bits)) or "no"
    if recipe.gguf:
        return f"{recipe.method}, GGUF with {spelled} bits"
    groups = f"in groups of {spec.group}" if spec.group else "with a scale per output"
    return f"{recipe.method}, {spelled} bits {groups}, {'symmetric' if spec.symmetric else 'asymmetric'}"


def bits_per_weight(original: ModelFolder, recipe: Recipe, kept_bits: int = 16) -> float:
    """Return the mean bits of the weights of products, with their scales."""
    sizes = {name: original.shapes[name][0] * original.shapes[name][1] for name in recipe.bits}
    stored = {
        name: kept_bits if bits == KEPT else recipe.grid(bits, original.shapes[name][1]).stored_bits
        for name, bits in recipe.bits.items()
    }
    return sum(size * stored[name] for name, size in sizes.items()) / max(sum(sizes.values()), 1)


def _card(
    model: Path,
    original: ModelFolder,
    recipe: Recipe,
    products: Sequence[ProductReport],
    format: str,
    calibration: str,
    quality: str,
) -> str:
    name = original.path.name
    kept = sorted(each for each, bits in recipe.bits.items() if bits == KEPT)
    lines = [
        f"---\nbase_model: {name}\ntags: [{format}, headrace]\n---",
        f"# {model.name}",
        f"[{name}] made smaller with `headrace compress`. Serve it with `headrace serve --model {model.name}`, or with "
        f"any engine that reads {format}.".replace(f"[{name}]", name),
        "## Recipe",
        f"| | |\n|---|---|\n| method | {describe_recipe(recipe)} |\n| clipping | "
        f"{'searched' if recipe.clip else 'none'} |\n| act order | {'yes' if recipe.act_order else 'no'} (gptq) |\n"
        f"| bits per weight | {bits_per_weight(original, recipe):.2f} in the layers' products, with their scales |\n"
        f"| kept as they were | embedding, head, norms{''.join(f', {each}' for each in kept)} |\n"
        f"| weight files | {original.weights.total_bytes / 1e6:,.1f} MB before, {folder_bytes(model) / 1e6:,.1f} MB "
        f"after |\n| calibration | {calibration} |",
    ]
    if quality:
        lines += ["## Quality", quality.strip()]
    lines += [
        "## Products",
        "Output error: square error of a product's outputs over their square, on calibration inputs.",
        "| product | bits | output error |\n|---|---:|---:|\n"
        + "\n".join(f"| {each.name} | {each.bits} | {each.error:.2e} |" for each in products),
    ]
    return "\n\n".join(lines) + "\n"
