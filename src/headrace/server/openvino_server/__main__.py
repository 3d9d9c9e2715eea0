"""Starts the OpenVINO server: opens the model, listens, and drains when it gets SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from headrace.server.http.connection import ConnectionBounds
from headrace.server.http.edge import Edge
from headrace.server.openvino_server.openai_app import OpenAiApp
from headrace.server.openvino_server.pipeline_thread import PipelineThread

_BACKLOG: Final = 256
_DRAIN_S: Final = 3600.0  # whoever started this program ends it earlier


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m headrace.server.openvino_server", description="Serve with OpenVINO GenAI."
    )
    parser.add_argument("model", help="folder with a model converted for OpenVINO, or a GGUF file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    parser.add_argument("--device", default="CPU", help="CPU, GPU, or one of several GPUs: GPU.1")
    parser.add_argument("--threads", type=int, help="compute threads of a CPU; OpenVINO decides by default")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests at once")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--max-model-len", type=int, help="tokens of a request, prompt and answer")
    parser.add_argument("--kv-cache-dtype", choices=("u8", "f16", "bf16", "f32"), help="OpenVINO decides by default")
    parser.add_argument("--kv-cache-gib", type=int, default=0, help="memory of the KV cache; 0: it grows")
    parser.add_argument("--no-prefix-cache", action="store_true")
    return parser.parse_args(arguments)


def open_pipeline(genai: Any, options: argparse.Namespace) -> Any:
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = options.kv_cache_gib
    scheduling.enable_prefix_caching = not options.no_prefix_cache
    scheduling.max_num_seqs = options.max_num_seqs
    scheduling.max_num_batched_tokens = options.max_num_batched_tokens
    properties: dict[str, Any] = {}
    if options.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    if options.kv_cache_dtype is not None:
        properties["KV_CACHE_PRECISION"] = options.kv_cache_dtype
    return genai.ContinuousBatchingPipeline(options.model, scheduling, options.device, properties)


async def serve(app: OpenAiApp, listening: socket.socket, connections: int) -> None:
    bounds = ConnectionBounds(
        connections=connections,
        address_connections=connections,
        header_bytes=64 * 1024,
        header_s=30.0,
        idle_s=3600.0,
        reader_s=60.0,
    )
    edge = Edge(app, bounds)
    await edge.listen(listening, _BACKLOG)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    await edge.drain(_DRAIN_S, asyncio.Event())
    await edge.close()


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    try:
        openvino = importlib.import_module("openvino")
        genai = importlib.import_module("openvino_genai")
    except ImportError:
        print(f"{sys.executable} has no openvino-genai. Install it: pip install openvino-genai", file=sys.stderr)
        return 2
    if not Path(options.model).exists():
        print(f"No such folder or file: {options.model}", file=sys.stderr)
        return 2
    pipeline = open_pipeline(genai, options)
    thread = PipelineThread(genai, pipeline)
    thread.start()
    app = OpenAiApp(
        openvino,
        genai,
        pipeline,
        thread,
        name=options.served_model_name or Path(options.model).name,
        key=os.environ.get("OPENVINO_API_KEY", ""),
        context=options.max_model_len,
    )
    asyncio.run(serve(app, socket.create_server((options.host, options.port)), options.max_num_seqs + _BACKLOG))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
