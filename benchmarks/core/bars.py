"""Headrace's own bars for the core and the engine, and whether a run meets them.

A bar that lacks our number or a peer's says so and does not count as passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from summary import HIGHER_IS_BETTER, Key, Row, Summary

DECODE_OF_FLOOR: Final = 0.88
DECODE_OF_PEER: Final = {"int4": 1.4, "int8": 1.1, "bf16": 1.3}
PREFILL_OF_PEER: Final = {"prefill-512": 0.7, "prefill-2048": 0.5}  # of the peer's time
PREFILL_OF_PEAK: Final = 0.5
BATCH_OF_PEER: Final = {"batch-8": 2.0, "batch-32": 2.5}
START_SHAPE: Final = ("qwen2.5-0.5b", "int4")
START_SECONDS: Final = 1.0
BATCH_OF_CORE: Final = 0.9
HOST_SECONDS: Final = 0.0005  # of a step of 32 sequences in which no step runs
HOST_SHARE: Final = 0.05
CACHED_OF_COLD: Final = 0.1
CACHED_OF_PEER: Final = 0.4
CHATS_BESIDE: Final = 2.0  # times the gap by themselves
KV_INT8_SPEED: Final = 1.0
BELIEVABLE: Final = 1.05  # more than a floor allows by so much says that the floor was measured on a busy machine


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    precision: str
    bar: str
    ours: Row | None
    best: Row | None  # the peer it is measured against; None where the bar is a floor
    found: str  # the number that is held against the bar
    passed: bool | None  # None: it could not be judged
    note: str = ""


def verdicts(results: dict[str, Any], shape: str) -> list[Verdict]:
    """Return the bars of the results' board."""
    summary = Summary(results)
    if results.get("board") == "engine":
        return [verdict for name in ("int8", "int4") for verdict in _of_engine(summary, shape, name)]
    return _of_core(results, summary, shape)


def _of_core(results: dict[str, Any], summary: Summary, shape: str) -> list[Verdict]:
    precisions = [name for name in DECODE_OF_PEER if any(each["precision"] == name for each in results["floors"])]
    found: list[Verdict] = []
    for name in precisions:
        key = (shape, name, "decode")
        found.append(_of_floor(summary, key, "decode, one stream", DECODE_OF_FLOOR, "of the bandwidth floor"))
        found.append(_of_peer(summary, key, "decode, one stream", DECODE_OF_PEER[name]))
    for metric, most in PREFILL_OF_PEER.items():
        what = f"prefill to first token, {metric.removeprefix('prefill-')} tokens"
        for name in precisions:
            key = (shape, name, metric)
            found.append(_of_peer(summary, key, what, most))
            if name != "int4":
                found.append(_of_floor(summary, key, what, PREFILL_OF_PEAK, "of the measured peak"))
    for metric, least in BATCH_OF_PEER.items():
        for name in precisions:
            what = f"{metric.removeprefix('batch-')} sequences in step"
            found.append(_of_peer(summary, (shape, name, metric), what, least))
    if (shape, "int4") == START_SHAPE and "int4" in precisions:
        found += _start(summary, (shape, "int4", "start-ready"))
    found += [_of_peer(summary, (shape, name, "memory"), "peak memory, one stream", 1.0) for name in precisions]
    found += [_of_peer(summary, (shape, name, "memory-batch"), "peak memory, batches too", 1.0) for name in precisions]
    return found


def _of_engine(summary: Summary, shape: str, name: str) -> list[Verdict]:
    found: list[Verdict] = []
    for metric, least in BATCH_OF_PEER.items():
        key = (shape, name, metric)
        what = f"{metric.removeprefix('batch-')} requests at once"
        core = summary.ours(key, f"bare core {name}")
        found.append(_of_peer(summary, key, what, least))
        found.append(_of_other(summary.ours(key), core, what, name, BATCH_OF_CORE, "of the bare core", more=True))
    for metric, most, unit in (("batch-32-host", HOST_SECONDS, 1e3), ("batch-32-host-share", HOST_SHARE, 100)):
        row = summary.ours((shape, name, metric))
        sign = "ms" if unit == 1e3 else "%"
        text, number = f"≤ {most * unit:g} {sign}", "-" if row is None else f"{row.median * unit:.2f} {sign}"
        passed = None if row is None else row.median <= most
        found.append(Verdict("host, a step of 32 requests", name, text, row, None, number, passed))
    cold, cached = summary.ours((shape, name, "cold")), summary.ours((shape, name, "cached"))
    what = "first token, 1,500 of 1,532 cached"
    found.append(_of_other(cached, cold, what, name, CACHED_OF_COLD, "of the cold one", more=False))
    found.append(_of_peer(summary, (shape, name, "cached"), what, CACHED_OF_PEER))
    alone, beside = (summary.ours((shape, name, metric)) for metric in ("chats-gap", "chats-gap-beside"))
    what = "8 chats beside prompts of 4,000, p99 gap"
    found.append(_of_other(beside, alone, what, name, CHATS_BESIDE, "of it alone", more=False))
    if name == "int8":
        key = (shape, name, "batch-32")
        small = summary.ours(key, "headrace int8, KV int8")
        what = "32 requests at once, KV in int8"
        found.append(_of_other(small, summary.ours(key), what, name, KV_INT8_SPEED, "of KV in bf16", more=True))
    return found


def _of_other(
    ours: Row | None, other: Row | None, what: str, name: str, bar: float, of_what: str, *, more: bool
) -> Verdict:
    text = f"{'≥' if more else '≤'} {bar:g} {of_what}"
    if ours is None or other is None:
        return Verdict(what, name, text, ours, other, "-", None)
    ratio = ours.median / other.median
    return Verdict(what, name, text, ours, other, f"{ratio:.2f}", ratio >= bar if more else ratio <= bar)


def _of_peer(summary: Summary, key: Key, what: str, bar: float) -> Verdict:
    ours, best = summary.ours(key), summary.best_peer(key)
    more = key[2] in HIGHER_IS_BETTER
    text = f"{'≥' if more else '≤'} {bar:g} of the best peer"
    if ours is None or best is None:
        return Verdict(what, key[1], text, ours, best, "-", None)
    ratio = ours.median / best.median
    return Verdict(what, key[1], text, ours, best, f"{ratio:.2f}", ratio >= bar if more else ratio <= bar)


def _of_floor(summary: Summary, key: Key, what: str, bar: float, of_what: str) -> Verdict:
    ours = summary.ours(key)
    share = None if ours is None else summary.share_of_floor(key, ours)
    text = f"≥ {bar:.0%} {of_what}"
    if ours is None or share is None:
        return Verdict(what, key[1], text, ours, None, "-", None)
    moment = summary.share_of_moment(key, ours)
    beside = "" if moment is None else f" ({moment:.0%} of the probes beside)"
    passed: bool | None = share >= bar
    note = ""
    if share > BELIEVABLE:
        passed, note = None, "the floor was measured on a busy machine"
    elif not passed and moment is not None and bar <= moment <= BELIEVABLE:
        note = "reached by the probes beside"
    return Verdict(what, key[1], text, ours, None, f"{share:.0%}{beside}", passed, note)


def _start(summary: Summary, key: Key) -> list[Verdict]:
    what = "warm start, process start to ready"
    ours = summary.ours(key)
    seconds = Verdict(
        what,
        key[1],
        f"< {START_SECONDS:g} s",
        ours,
        None,
        "-" if ours is None else f"{ours.median:.2f} s",
        None if ours is None else ours.median < START_SECONDS,
    )
    return [seconds, _of_peer(summary, key, what, 1.0)]
