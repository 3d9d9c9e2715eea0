"""llama.cpp's real server, from the package xllamacpp, with the arguments of the program llama-server that we pass.

Files beside the model change how it behaves: `slow` delays its start by a second, `broken` lets its start fail.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--alias")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--ctx-size", type=int, default=1024)
    parser.add_argument("--parallel", type=int, default=1)
    given = parser.parse_args()
    if given.model.with_name("broken").exists():
        print("error: the model is broken", flush=True)
        sys.exit(3)
    if given.model.with_name("slow").exists():
        time.sleep(1.0)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(given.model)
    params.hostnames, params.port = [given.host], given.port
    params.model_alias = {given.alias}
    params.endpoint_metrics = given.metrics
    params.n_ctx, params.n_parallel = given.ctx_size, given.parallel
    params.cpuparams.n_threads = 2
    params.warmup = False
    params.api_keys = [os.environ["LLAMA_API_KEY"]]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
