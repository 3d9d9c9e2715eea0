"""`headrace speculate`: find out how a model drafts for itself best, and what that gains on your prompts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from headrace.bench.evaluation.documents import read_prompts
from headrace.bench.self_speculation import SelfDraft, can_draft_for_itself, check_takes_drafts, choose_drafts
from headrace.cli.output_path import check_output_folder
from headrace.config.toml_text import toml_value
from headrace.errors import RequestError
from headrace.llm import LLM
from headrace.models.model_folder import find_model, open_model
from headrace.models.prediction_module import has_prediction_module
from headrace.models.weight_cache import cache_folder

_COLUMNS = 100


class Measured(msgspec.Struct):
    """What one way to draft did with the prompts."""

    name: str
    options: dict[str, Any]
    seconds: list[float] = []  # by round
    tokens: int = 0  # of a round
    drafted: int = 0
    accepted: int = 0
    speedup: float = 0.0  # median over the rounds, each against the run without drafts beside it


def speculate(
    model: str = "mini",
    /,
    *,
    prompts: Path,
    weights: str = "auto",
    draft_weights: str = "int8,int4",
    heads: list[Path] | None = None,
    count: int = 8,
    tokens: int = 64,
    rounds: int = 3,
    threads: int | None = None,
    cache: bool = True,
    json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
) -> None:
    """Find how a model drafts for itself best, and what that gains on your prompts.

    Usage: headrace speculate mini --prompts questions.jsonl

    It leaves out layers, and tries lower precisions, and counts how often the result chooses the model's own tokens.
    The best two are then measured beside n-gram drafts, no drafts and the checkpoint's own prediction module, in
    turns. Drafts never change an answer.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft), or a downloaded model's name.
    prompts
        Your own prompts: JSONL as for headrace evaluate.
    weights
        Precision of the model's weights.
    draft_weights
        Lower precisions to try for drafts, separated by commas; empty for none.
    heads
        Folder of draft heads to measure beside the others; give it again for more.
    count
        Prompts to use, from the beginning of the file.
    tokens
        Tokens of each answer.
    rounds
        Measurements of each way.
    threads
        Threads of the engine. Default: all cores.
    cache
        Keep the packed weights in the cache folder.
    json
        Write the result to this file as JSON; `-` prints it.
    """
    for name, value, least, most in (("count", count, 1, 1000), ("tokens", tokens, 4, 1024), ("rounds", rounds, 1, 99)):
        if not least <= value <= most:
            raise RequestError(f"{name} must be {least} to {most}, not {value}.", parameter=name)
    check_output_folder(json, "json")
    folder = open_model(find_model(model))
    check_takes_drafts(folder.spec, model)
    documents = read_prompts(prompts)[:count]
    common: dict[str, Any] = {
        "weights": weights,
        "threads": threads,
        "cache": cache,
        "context": min(2048, folder.spec.context),
    }
    plain = LLM(folder, speculation="none", **common)
    console = Console(highlight=False, stderr=True)
    try:
        asked = [_tokens(plain, each.messages, each.prompt)[-1024:] for each in documents]
        found: list[SelfDraft] = []
        if can_draft_for_itself(folder.spec):
            found = choose_drafts(
                plain.opened.executor,
                folder,
                asked,
                answer=min(tokens, 32),
                precisions=(None, *(each.strip() for each in draft_weights.split(",") if each.strip())),
                cache=cache_folder() if cache else None,
                progress=(lambda text: console.print(f"Trying {text}")) if sys.stderr.isatty() else None,
            )
        ways = [Measured("none", {"speculation": "none"}), Measured("n-grams", {"speculation": "ngram"})]
        ways += [Measured(_name(draft), draft.options) for draft in found[:2] if draft.speedup > 1.0]
        if has_prediction_module(folder):
            ways.append(Measured("its prediction module", {"speculation": "mtp"}))
        ways += [
            Measured(f"heads, {each.name}", {"speculation": "heads", "draft_heads": str(each)}) for each in heads or ()
        ]
        _measure(ways, plain, folder, common, asked, tokens, rounds)
    finally:
        plain.close()
    if json is not None:
        report = {
            "drafts": [{**msgspec.to_builtins(each), "options": each.options} for each in found],
            "measured": ways,
        }
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
        if str(json) == "-":
            print(encoded, end="")
            return
        json.write_text(encoded, encoding="utf-8")
    _show(found, ways)


def _tokens(llm: LLM, messages: list[dict[str, Any]] | None, prompt: str) -> list[int]:
    tokenizer = llm.tokenizer
    if messages is not None:
        return list(tokenizer.encode(tokenizer.apply_template(messages), add_special_tokens=False))
    return list(tokenizer.encode(prompt))


def _measure(
    ways: list[Measured],
    plain: LLM,
    folder: Any,
    common: dict[str, Any],
    asked: list[list[int]],
    tokens: int,
    rounds: int,
) -> None:
    llms = [plain if way.name == "none" else LLM(folder, **common, **way.options) for way in ways]
    try:
        expected: list[list[int]] = []
        for turn in range(rounds + 1):  # the first is a warm-up
            for way, llm in zip(ways, llms, strict=True):
                began = time.perf_counter()
                answers = [llm.generate([each], max_tokens=tokens, temperature=0.0)[0].completions[0] for each in asked]
                seconds = time.perf_counter() - began - sum(each.usage.prefill_s for each in answers)
                outputs = [each.tokens for each in answers]
                expected = expected or outputs
                if outputs != expected:
                    raise RequestError(f"Drafts by {way.name} changed an answer. Please report this.")
                if turn:
                    way.seconds.append(seconds)
                    way.tokens = sum(map(len, outputs))
                    way.drafted += sum(each.usage.drafted for each in answers)
                    way.accepted += sum(each.usage.accepted for each in answers)
    finally:
        for llm in llms:
            if llm is not plain:
                llm.close()
    for way in ways:
        pairs = zip(ways[0].seconds, way.seconds, strict=True)
        way.speedup = median(before / after for before, after in pairs)


def _name(draft: SelfDraft) -> str:
    layers = f"without layers {', '.join(map(str, draft.skip_layers))}" if draft.skip_layers else "all layers"
    return f"itself, {layers}" + (f", {draft.weights}" if draft.weights else "")


def _show(found: list[SelfDraft], ways: list[Measured]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
    if found:
        table = Table("draft by", "same tokens", "cost of a draft", "predicted", box=None)
        for draft in found[:6]:
            table.add_row(_name(draft), f"{draft.agreement:.0%}", f"{draft.cost:.2f} steps", f"{draft.speedup:.2f}x")
        console.print(table)
    else:
        console.print("It cannot draft for itself with layers left out: it has recurrent layers.")
    table = Table("measured", "tokens/s", "speed", "accepted", box=None)
    for way in ways:
        accepted = f"{way.accepted / way.drafted:.0%} of {way.drafted:,}" if way.drafted else ""
        table.add_row(way.name, f"{way.tokens / median(way.seconds):,.1f}", f"{way.speedup:.2f}x", accepted)
    console.print(table)
    best = max(ways, key=lambda way: way.speedup)
    if best.speedup <= 1.02 or best.name == "none":
        console.print('No drafts pay on these prompts: set speculation = "none", or keep the default.')
    else:
        options = ", ".join(f"{key} = {toml_value(value)}" for key, value in best.options.items())
        console.print(f"Best: options = {{ {options} }}")
