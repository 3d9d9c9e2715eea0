"""The sections [pipelines.NAME]: stages around a model, each with a time budget, and how the answer is delivered.

A pipeline lists its stages in `stages`; a table of the same name sets what differs from a stage's defaults.
headrace.pipelines.pipeline_rules checks the rules between keys.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config.value_types import Count, Milliseconds, Section, Share, Text

StageName = Literal["embed", "search", "rerank", "assemble", "tools", "generate", "check"]
Late = Literal["skip", "fewer", "cached", "stop"]  # what becomes of a stage that does not end within its budget
Micros = Annotated[int, Meta(ge=0, le=10**15)]  # millionths of the currency
CacheSeconds = Annotated[float, Meta(ge=0)]
STAGE_ORDER: Final[tuple[StageName, ...]] = ("embed", "search", "rerank", "assemble", "tools", "generate", "check")


class EmbedStage(Section, frozen=True):
    """Turns the question into a vector by the collection's encoder, apart from the search."""

    budget_ms: Milliseconds | None = None  # time the stage may take; default: what later stages leave
    late: Late = "skip"
    cache_s: CacheSeconds = 300.0  # seconds a question's vector is reused; 0: never


class SearchStage(Section, frozen=True):
    """Finds passages in a collection."""

    budget_ms: Milliseconds | None = None
    late: Late = "skip"
    cache_s: CacheSeconds = 0.0
    collection: Text = "docs"
    k: Count = 8  # passages to find
    filters: dict[str, Text] = msgspec.field(default_factory=dict[str, Text])  # metadata that passages must have
    client_filters: bool = False  # requests may add filters of their own


class RerankStage(Section, frozen=True):
    """Orders the passages by a reranker's scores."""

    budget_ms: Milliseconds | None = None
    late: Late = "fewer"  # fewer: what was ranked in time comes first, then the rest as it was found
    cache_s: CacheSeconds = 0.0
    model: Text | None = None  # must be set: a reranker, or an encoder whose embeddings are compared
    keep: Count = 4  # passages to keep
    batch: Count = 8  # passages ranked together; smaller batches lose less when the time ends


class AssembleStage(Section, frozen=True):
    """Chooses and orders the passages that the model reads."""

    budget_ms: Milliseconds | None = None
    late: Late = "fewer"
    keep: Count = 6  # passages the model reads
    # stable: by id, so that the same passages give the same prompt prefix, which the prefix cache reuses; warm: as
    # score, but one of those that `warm` keeps comes first
    order: Literal["score", "stable", "warm"] = "score"
    warm: Annotated[int, Meta(ge=0, le=128)] = 0  # most used beginnings of prompts whose KV the engine keeps, at most
    warm_tokens: Count = 8192  # tokens of all of them together, each with the instructions before it, at most
    least_score: float | None = None  # passages with a lower score are left out


class ToolsStage(Section, frozen=True):
    """Lets a model call tools in a loop before the answer. See how-to/run-agents.md."""

    budget_ms: Milliseconds | None = None
    late: Late = "fewer"  # fewer: the answer is made from the results that are there
    tools: tuple[Text, ...] = ()  # names of [tools.NAME] that the model may call
    model: Text | None = None  # model of the intermediate steps; default: the pipeline's
    instructions: str = ""  # system message of the steps; default: a short one
    keyless: bool = False  # callers without an API key may use the tools
    steps: Annotated[int, Meta(ge=1, le=64)] = 4  # model calls, at most
    calls: Annotated[int, Meta(ge=1, le=256)] = 16  # tool calls, at most
    parallel: Annotated[int, Meta(ge=1, le=64)] = 8  # tool calls at once
    tokens: Count = 8192  # prompt and output tokens of all steps, at most
    micros: Micros | None = None  # millionths of the currency that the steps may cost; default: no limit
    step_tokens: Count = 256  # output tokens of one step, at most
    result_tokens: Count = 512  # tokens of one tool's result that the model reads


class GenerateStage(Section, frozen=True):
    """Writes the answer. Its engine gets all the time that later stages leave as its deadline."""

    budget_ms: Milliseconds = 1000.0  # time kept free for it by earlier stages
    late: Late = "fewer"  # fewer: the text so far, or sentences of the sources if there is none
    # The answer if nothing is known in time: no text, no source. Empty: the request fails with 504
    no_answer: str = "There was not enough time to find an answer. Please ask again."
    model: Text | None = None  # default: the pipeline's
    instructions: str = ""  # system message
    max_tokens: Count | None = None
    # Popular-answer mode: the first of these that can answer does. cache: an earlier answer to the same question;
    # extract: sentences of the sources; small: the model `small`, if it is confident; large: the model
    order: tuple[Literal["cache", "extract", "small", "large"], ...] = ("large",)
    cache_s: CacheSeconds = 600.0  # seconds an answer is reused, with "cache" in `order`
    small: Text | None = None  # smaller model, with "small" in `order`
    small_confidence: Share = 0.6  # mean token probability from which its answer is used
    extract_confidence: Share = 0.8  # confidence from which sentences of the sources are the answer


class CheckStage(Section, frozen=True):
    """Checks citations against the sources, while the answer streams and at its end."""

    budget_ms: Milliseconds = 20.0
    late: Late = "skip"
    unknown: Literal["drop", "mark"] = "drop"  # citations of sources that do not exist: left out, or only reported
    # Share of a cited sentence's words that the source must have, else the citation is reported as unsupported
    least_support: Share = 0.3


class PipelineConfig(Section, frozen=True):
    """A declared sequence of stages around a model, with one deadline."""

    stages: tuple[StageName, ...]
    description: str = ""
    model: Text | None = None  # answers; default: the server's default model
    deadline_ms: Milliseconds = 10_000.0  # of requests that set none; requests may ask for less, not for more
    embed: EmbedStage = EmbedStage()
    search: SearchStage = SearchStage()
    rerank: RerankStage = RerankStage()
    assemble: AssembleStage = AssembleStage()
    tools: ToolsStage = ToolsStage()
    generate: GenerateStage = GenerateStage()
    check: CheckStage = CheckStage()
    # full: one answer. answer-first: a short answer, and the details when the request says `detail`
    mode: Literal["full", "answer-first"] = "full"
    short_tokens: Count = 48  # output tokens of the short answer
    followups: Annotated[int, Meta(ge=0, le=5)] = 0  # questions to suggest after the answer
    followups_ms: Milliseconds = 1000.0  # time they may take, within the deadline
    prefetch: Annotated[int, Meta(ge=0, le=5)] = 0  # follow-up questions whose passages are found ahead
    sentences: bool = False  # streams of this pipeline also have sentence events, for a synthesiser
    first_sentence_chars: Count = 24  # characters of the first sentence event, about
    sentence_chars: Count = 160  # characters of the others, at most
    tags: tuple[Text, ...] = ()  # of cached stage results and answers: an invalidation of one removes them
