"""The result of a benchmark: rows of requests, their statistics, stages, and the JSON file.

Times of rows are seconds; times of statistics are milliseconds. The file has the keys of `vllm bench serve` at the top
level, and the whole BenchmarkResult under "headrace".
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.errors import RequestError

VERSION: Final = 1  # of the "headrace" part of the file
MOST_FILE: Final = 2 * 1024**3  # bytes of a result file: 2 GiB
PERCENTILES: Final = (50, 90, 95, 99)


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a running benchmark, without warm-up requests."""

    seconds: float  # since the run's start, 0 during warm-up
    stage: int = 0  # index, from 0
    stages: int | None = None  # None: not known yet, in a sweep
    load: str = ""  # of the stage: "8 at once", "4 requests/s"
    doing: str = "running"  # warming up, running, finishing
    planned: int = 0  # requests that should have been sent by now
    sent: int = 0
    running: int = 0
    done: int = 0  # successful
    failed: int = 0
    most_requests: int | None = None  # limit of the stage; a progress bar uses it and most_seconds
    most_seconds: float | None = None
    stage_seconds: float = 0.0  # since the stage's start
    stage_done: int = 0  # finished requests of the stage, successful or not
    ttft_p50: float | None = None  # milliseconds; these four are of the latest requests
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None
    tokens_per_s: float = 0.0  # output tokens in the last second; a chunk counts as one until the usage is known
    lag_ms: float = 0.0  # longest lag behind the schedule in the last second


class RequestRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Times are seconds; None: not reported by the server."""

    number: int  # in order of creation
    stage: int = 0  # index in BenchmarkResult.stages
    tenant: str = ""
    surface: str = ""
    workload: str = ""
    session: int = 0  # the same for all requests of a conversation
    turn: int = 0  # in the conversation, from 0
    planned: float = 0.0  # when it should have been sent, from the run's start; in a closed loop its start
    start: float = 0.0  # when it was sent, from the run's start, before opening a connection
    lag: float = 0.0  # from planned to sent: the client's own delay
    waited: float = 0.0  # for a slot below --concurrency, if a rate is given too
    connect: float = 0.0  # to open a connection, part of ttft and e2el; 0 on a kept one
    ok: bool = False
    error: str = ""  # kind: refused, unreachable, tls, reset, timeout, http 429, malformed, stream, cut, empty, ...
    why: str = ""  # the error's message, shortened
    status: int = 0  # HTTP; 0: no response
    finish: str = ""  # the server's finish_reason
    asked_input: int = 0  # intended prompt tokens; 0: unknown
    asked_output: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    tokens_from: str = ""  # usage, text (re-tokenised) or chunks: where output_tokens comes from
    ttft: float | None = None  # to the first content, reasoning or tool delta; None if not streamed
    ttfo: float | None = None  # to the first output other than reasoning
    e2el: float | None = None  # to the last byte or the failure; None if not sent
    gaps: list[float] = []  # between streamed outputs
    chunks: int = 0  # streamed outputs
    together: int = 0  # of them, read together with the previous one
    queue_ms: float | None = None  # reported by the server, in milliseconds
    prefill_ms: float | None = None
    decode_ms: float | None = None
    text: str = ""  # the answer, if texts are kept

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for answers of one token or without streaming."""
        if self.e2el is None or self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def end(self) -> float:
        """Seconds from the run's start; its start if it never ended."""
        return self.start + (self.e2el or 0.0)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of `count` values; times are milliseconds. Percentiles interpolate linearly."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    least: float
    most: float


class RequestStats(msgspec.Struct, kw_only=True):
    """Statistics of a group of requests. Times cover the successful ones."""

    name: str
    requests: int = 0
    completed: int = 0
    failed: int = 0
    seconds: float = 0.0  # from the first start to the last end
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them; 0 if the server does not report it
    output_tokens: int = 0
    request_throughput: float = 0.0  # per second, like the two below
    output_throughput: float = 0.0
    total_throughput: float = 0.0  # tokens of prompts and answers
    good: int | None = None  # met every objective; None without objectives
    goodput: float | None = None
    peak_running: int = 0
    peak_output_per_s: float = 0.0  # tokens in the best second
    ttft: Distribution | None = None
    ttfo: Distribution | None = None
    itl: Distribution | None = None
    tpot: Distribution | None = None
    e2el: Distribution | None = None
    queue: Distribution | None = None
    prefill: Distribution | None = None
    decode: Distribution | None = None
    lag: Distribution | None = None  # of all requests in an open loop
    chunk_tokens: Distribution | None = None  # tokens per streamed output, averaged per request
    together: float = 0.0  # share of streamed outputs read together with the previous one
    errors: dict[str, int] = {}  # by kind


class StageResult(msgspec.Struct, kw_only=True):
    """One stage of a run, with one load."""

    name: str  # "4 requests/s", "8 at once"
    rate: float | None = None  # planned requests per second; None in a closed loop
    concurrency: int | None = None  # None: limited by the client only
    began: float = 0.0  # seconds from the run's start
    ended: float = 0.0
    figures: RequestStats
    kept_up: bool = True  # in a sweep: whether the server kept up
    why: str = ""  # reason if it did not


class TokenCheck(msgspec.Struct, kw_only=True):
    """The server's count of output tokens and ours, for a sample of answers."""

    answers: int
    usage: int
    counted: int
    by: str  # counter: tokenizer or server
    difference: float  # share of the server's count: 0.05 is five per cent
    past_ends: float | None = None  # difference for answers that continued past their end tokens, if others decided


class BenchmarkResult(msgspec.Struct, kw_only=True):
    version: int = VERSION
    headrace: str = ""  # program version
    label: str = ""
    url: str = ""
    endpoint: str = ""  # /v1/chat/completions, /v1/completions
    model: str = ""
    tokenizer: str = ""  # a folder, "the server's /tokenize" or "usage"
    streamed: bool = True
    started_at: str = ""  # ISO 8601, UTC
    ended_at: str = ""
    duration: float = 0.0  # seconds, all stages
    seed: int = 0
    nonce: str = ""  # varies the first words of each prompt; empty: prompts repeat in every run with this seed
    workload: str = ""  # description
    load: str = ""  # closed, open, ramp, sweep or trace
    arrivals: str = ""  # constant, poisson, gamma or trace
    burstiness: float = 1.0
    ramp: tuple[float, float] | None = None  # requests/s
    arguments: dict[str, Any] = {}  # of the command, without keys
    objectives: dict[str, float] = {}  # milliseconds by ttft, ttfo, tpot, e2el
    figures: RequestStats
    stages: list[StageResult] = []
    knee: int | None = None  # in a sweep: index of the highest load that the server kept up with
    tenants: list[RequestStats] = []  # these four only if there is more than one
    surfaces: list[RequestStats] = []
    workloads: list[RequestStats] = []
    lengths: list[RequestStats] = []  # by prompt tokens
    warmup: int = 0  # unmeasured requests
    token_check: TokenCheck | None = None
    warnings: list[str] = []
    rows: list[RequestRow] = []  # empty if details are left out
    gaps_left_out: int = 0  # rows whose gaps exceed the limit


def write(result: BenchmarkResult, path: Path) -> None:
    """Write vLLM's keys at the top level and the result under "headrace". Gaps and texts of rows are stored once."""
    bare = [msgspec.structs.replace(row, gaps=[], text="") for row in result.rows]
    own = msgspec.to_builtins(msgspec.structs.replace(result, rows=bare))
    path.write_bytes(msgspec.json.encode(vllm_keys(result) | {"headrace": own}) + b"\n")


def read(path: Path) -> BenchmarkResult:
    """Read a result file. Raises RequestError if it is not one."""
    with path.open("rb") as file:
        raw = file.read(MOST_FILE + 1)
    try:
        if len(raw) > MOST_FILE:
            raise msgspec.ValidationError(f"the file is longer than {MOST_FILE} bytes")
        found = msgspec.json.decode(raw, type=_File)
        if found.headrace.version != VERSION:
            raise msgspec.ValidationError(
                f"the file has version {found.headrace.version}; this program reads version {VERSION}"
            )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not a result of headrace bench: {error}.") from None
    for row, gaps, text in itertools.zip_longest(found.headrace.rows, found.itls, found.generated_texts):
        if row is not None:
            row.gaps = gaps or []
            row.text = text or ""
    return found.headrace


class _File(msgspec.Struct):
    headrace: BenchmarkResult
    itls: list[list[float]] = []
    generated_texts: list[str] = []


def vllm_keys(result: BenchmarkResult) -> dict[str, Any]:
    """Return the keys of `vllm bench serve`: seconds in lists, milliseconds in `..._ms`."""
    total = result.figures
    stage = result.stages[0] if len(result.stages) == 1 else None
    rate = stage.rate if stage is not None else None
    found: dict[str, Any] = {
        "date": result.started_at,
        "endpoint_type": "openai-chat" if result.endpoint.endswith("/chat/completions") else "openai",
        "backend": "openai-chat" if result.endpoint.endswith("/chat/completions") else "openai",
        "label": result.label or None,
        "model_id": result.model,
        "tokenizer_id": result.tokenizer or None,
        "num_prompts": total.requests,
        "request_rate": "inf" if rate is None else rate,
        "burstiness": result.burstiness,
        "max_concurrency": stage.concurrency if stage is not None else None,
    }
    if result.ramp is not None:
        low, high = result.ramp
        found |= {"ramp_up_strategy": "linear", "ramp_up_start_rps": low, "ramp_up_end_rps": high}
    found |= {
        "duration": result.duration,
        "completed": total.completed,
        "failed": total.failed,
        "total_input_tokens": total.prompt_tokens,
        "total_output_tokens": total.output_tokens,
        "request_throughput": total.request_throughput,
        "request_goodput": total.goodput,
        "output_throughput": total.output_throughput,
        "total_token_throughput": total.total_throughput,
        "max_output_tokens_per_s": total.peak_output_per_s,
        "max_concurrent_requests": total.peak_running,
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        spread: Distribution | None = getattr(total, name)
        if spread is None:
            continue
        found[f"mean_{name}_ms"] = spread.mean
        found[f"median_{name}_ms"] = spread.p50
        found[f"std_{name}_ms"] = spread.std
        found |= {f"p{percent}_{name}_ms": getattr(spread, f"p{percent}") for percent in PERCENTILES}
    if result.rows:
        found |= {
            "input_lens": [row.prompt_tokens for row in result.rows],
            "output_lens": [row.output_tokens for row in result.rows],
            "ttfts": [row.ttft or 0.0 for row in result.rows],
            "itls": [row.gaps for row in result.rows],
            "latencies": [row.e2el or 0.0 for row in result.rows],
            "start_times": [row.start for row in result.rows],
            "queue_times": [row.waited for row in result.rows],
            "generated_texts": [row.text for row in result.rows],
            "errors": [f"{row.error}: {row.why}" if row.error else "" for row in result.rows],
        }
    return found
