"""The levels that a tuning walks for a model and its traffic: lossless ones first, then those that change the model."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from headrace.bench.traffic_profile import TrafficProfile
from headrace.bench.tuning.search import Level, LevelChoice, Setting
from headrace.models.spec import ModelSpec
from headrace.variant import DEFAULT_KV_BLOCK, KV_BLOCKS

NO_PROMPTS: Final = "it changes the model, and nothing says what it may cost: pass --prompts with your own prompts"


# Every option that a level may set is in the first setting, so that a choice that changes nothing is known as such.
_COMMON: Final[Setting] = {
    "max_rows": 512,
    "most_drafts": 8,
    "draft_model": None,
    "keep": [],
    "kv_tokens": None,
    "kv_block": DEFAULT_KV_BLOCK,
}


class TuningInputs(msgspec.Struct, frozen=True, kw_only=True):
    spec: ModelSpec
    traffic: TrafficProfile
    cores: int
    stored: bool  # the files hold quantised weights
    gate: bool  # prompts to gate with are given
    users: int  # requests at once
    draft: str | None = None  # a drafter with the same tokenizer
    has_module: bool = False  # the checkpoint has a prediction module of its own
    smaller: str | None = None  # a model that may take the place of this one


def naive_setting(inputs: TuningInputs) -> Setting:
    """Return how a first script serves: one thread and one request at a time, nothing reused, nothing guessed."""
    return {
        "batching": "serial",
        "threads": 1,
        "max_sequences": 1,
        "prefix_cache": False,
        "speculation": "none",
        "weights": "auto" if inputs.stored else "f32",
        "kv": "f32",
        "context": default_context(inputs),
        **_COMMON,
    }


def default_setting(inputs: TuningInputs) -> Setting:
    """Return the defaults of `headrace serve`."""
    return {
        "batching": "continuous",
        "threads": inputs.cores,
        "max_sequences": 64,
        "prefix_cache": True,
        "speculation": "ngram",
        "weights": "auto",
        "kv": "bf16",
        "context": default_context(inputs),
        **_COMMON,
    }


def default_context(inputs: TuningInputs) -> int:
    return min(inputs.spec.context, 8192)


def tuning_levels(inputs: TuningInputs) -> list[Level]:
    counts = sorted({1, *(count for count in (2, 4, 8, 16, 32, 64) if count < inputs.cores), inputs.cores})
    levels = [
        Level(
            name="batching",
            what="requests join the batch at every step instead of one at a time",
            choices=(
                LevelChoice("continuous, 8", {"batching": "continuous", "max_sequences": 8}),
                LevelChoice("continuous, 64", {"batching": "continuous", "max_sequences": 64}),
            ),
        ),
        Level(
            name="prefix cache",
            what="prompts that start alike share their KV",
            choices=(LevelChoice("on", {"prefix_cache": True}),),
            skip="" if inputs.traffic.reused > 0.005 else "no prompt of the traffic starts as another one did",
        ),
        Level(
            name="threads",
            what="threads that compute a step",
            choices=tuple(LevelChoice(str(count), {"threads": count}) for count in counts),
        ),
        Level(
            name="step rows",
            what="tokens of one step: larger steps compute prompts faster, smaller ones keep streams even",
            choices=tuple(LevelChoice(str(rows), {"max_rows": rows}) for rows in (128, 256, 512, 1024)),
        ),
        Level(
            name="KV blocks",
            what="tokens of a block of KV: larger blocks take less host time, smaller ones hold fewer empty slots",
            choices=tuple(LevelChoice(str(tokens), {"kv_block": tokens}) for tokens in KV_BLOCKS),
        ),
        Level(name="speculation", what="draft tokens, verified in the same step", choices=_drafts(inputs)),
        Level(
            name="huge pages",
            what="large pages of memory for the weights",
            choices=(),
            skip="the system decides, not a variant: headrace doctor says whether they are on",
        ),
        _context_level(inputs),
    ]
    no_gate = "" if inputs.gate else NO_PROMPTS
    levels += [
        Level(
            name="16 bits",
            what="16-bit weights and KV in place of 32 bits",
            choices=(LevelChoice("bf16", {"weights": "bf16", "kv": "bf16"}),),
            lossy=True,
            skip="the files are quantised" if inputs.stored else no_gate,
        ),
        Level(
            name="KV precision",
            what="KV cache of 8 or 4 bits",
            choices=(LevelChoice("int8", {"kv": "int8"}), LevelChoice("int4", {"kv": "int4"})),
            lossy=True,
            skip=no_gate,
        ),
        Level(
            name="weights",
            what="8-bit weights",
            choices=(LevelChoice("int8", {"weights": "int8"}),),
            lossy=True,
            skip="the files are quantised" if inputs.stored else no_gate,
        ),
        Level(
            name="mixed weights",
            what="4-bit weights, with 8 bits where errors count most",
            choices=(
                LevelChoice("int4, down and o at int8", {"weights": "int4", "keep": _KEPT}),
                LevelChoice("int4, down at int8", {"weights": "int4", "keep": _KEPT[:1]}),
            ),
            lossy=True,
            skip="the files are quantised" if inputs.stored else no_gate,
        ),
        Level(
            name="4-bit weights",
            what="4-bit weights; headrace compress calibrates them on your text",
            choices=(LevelChoice("int4", {"weights": "int4", "keep": []}),),
            lossy=True,
            skip="the files are quantised" if inputs.stored else no_gate,
        ),
        Level(
            name="smaller model",
            what="another model in place of this one",
            choices=() if inputs.smaller is None else (LevelChoice(inputs.smaller, {"model": inputs.smaller}),),
            lossy=True,
            skip=no_gate if inputs.smaller is not None else "no smaller model is named: pass --smaller",
        ),
    ]
    return levels


_KEPT: Final = ["layers.*.mlp.down=int8", "layers.*.attn.o=int8"]


def _drafts(inputs: TuningInputs) -> tuple[LevelChoice, ...]:
    choices = [
        LevelChoice("none", {"speculation": "none", "draft_model": None}),
        *(
            LevelChoice(f"ngram, {most}", {"speculation": "ngram", "draft_model": None, "most_drafts": most})
            for most in (4, 8)
        ),
    ]
    if inputs.draft is not None:
        choices += [
            LevelChoice(
                f"{inputs.draft}, {most}", {"speculation": "model", "draft_model": inputs.draft, "most_drafts": most}
            )
            for most in (2, 4)
        ]
    if inputs.has_module:
        choices += [
            LevelChoice(f"mtp, {most}", {"speculation": "mtp", "draft_model": None, "most_drafts": most})
            for most in (1, 2, 4)
        ]
    return tuple(choices)


def _context_level(inputs: TuningInputs) -> Level:
    context = min(inputs.spec.context, inputs.traffic.context)
    current = default_context(inputs)
    tokens = max(context, 16 * math.ceil(1.25 * inputs.users * inputs.traffic.total_p95 / 16))
    beyond = f"; {inputs.traffic.beyond:.1%} of the requests would be refused" if inputs.traffic.beyond else ""
    return Level(
        name="context",
        what=f"the context that 95 % of the traffic needs in place of {current:,}{beyond}",
        choices=(LevelChoice(f"{context:,}", {"context": context, "kv_tokens": tokens}),),
        aim="memory",
        skip="" if context < current else f"the traffic needs {context:,} tokens",
    )
