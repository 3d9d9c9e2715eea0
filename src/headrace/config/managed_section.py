"""Configuration of a managed engine: the server of another project that Headrace starts and supervises.

The table belongs to an upstream, whose `kind` says which engine it is. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from headrace.config.value_types import Count, Finding, Port, Seconds, Section, Text

MANAGED_KINDS: Final = ("vllm", "sglang", "llama.cpp", "openvino")
Variables = Annotated[dict[str, str], Meta(extra={"secret": True})]  # values may be secrets, such as a hub's token
_Gpu = Annotated[int, Meta(ge=0, le=1023)]


class ManagedConfig(Section, frozen=True):
    """A server that Headrace starts, checks, restarts, drains and stops."""

    model: Text  # folder, file or hub name, as the engine takes it
    command: tuple[Text, ...] = ()  # default: the engine's own command
    port: Port = 0  # of the engine, on 127.0.0.1; 0 picks a free one
    gpus: tuple[_Gpu, ...] | None = None  # numbers of the GPUs it may see; default: all
    tensor_parallel: Count = 1  # GPUs that share each layer
    pipeline_parallel: Count = 1  # groups of GPUs that share the layers
    quantisation: Text | None = None  # of the weights, by the engine's name; default: what the files have
    kv_dtype: Text | None = None  # of the KV cache, by the engine's name
    sequences: Count | None = None  # requests that the engine runs at once
    adapters: dict[str, Text] = msgspec.field(default_factory=dict[str, str])  # LoRA adapters by name
    arguments: tuple[str, ...] = ()  # further arguments of the engine
    environment: Variables = msgspec.field(default_factory=dict[str, str])  # further variables
    most_waiting: Annotated[int, Meta(ge=0)] = 32  # in the engine's queue; beyond it, requests wait or go elsewhere
    start_s: Seconds = 900.0  # until the engine answers its health check
    stop_s: Seconds = 30.0  # until it has ended by itself
    restart_s: Seconds = 1.0  # before the second restart in a row; doubles with each
    restart_most_s: Seconds = 60.0


def check_managed(
    config: ManagedConfig | None, kind: str, url: str | None, processes: int, where: str
) -> Iterator[Finding]:
    """Check an upstream's `url` and its managed engine."""
    if config is None:
        return
    here = f"{where}.managed"
    if url is not None:
        yield f"{where}.url", "expected no URL: Headrace starts this engine itself"
    if kind not in MANAGED_KINDS:
        yield f"{where}.kind", f"expected one of {', '.join(MANAGED_KINDS)} for a managed engine, found {kind}"
    if processes > 1:
        yield here, "this needs server.processes = 1: each process would start an engine of its own"
    if kind in ("llama.cpp", "openvino") and config.quantisation is not None:
        yield f"{here}.quantisation", f"{kind} takes the quantisation of the files; choose others"
    if kind == "openvino":
        for name in ("tensor_parallel", "pipeline_parallel"):
            if getattr(config, name) > 1:
                yield f"{here}.{name}", "openvino computes a model on one device; expected 1"
        if config.adapters:
            yield f"{here}.adapters", "this needs vllm, sglang or llama.cpp"
    parallel = config.tensor_parallel * config.pipeline_parallel
    if config.gpus is not None and kind != "llama.cpp" and parallel != len(config.gpus):
        yield (
            f"{here}.gpus",
            f"expected {parallel} GPUs, tensor_parallel times pipeline_parallel, found {len(config.gpus)}",
        )
