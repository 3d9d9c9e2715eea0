"""`headrace kv-offsets`: measure a model's mean keys on a text and write them for `kv_offsets`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.bench.evaluation.documents import read_documents
from headrace.bench.evaluation.evaluation import EvaluationProgress
from headrace.cli.evaluate import EvaluationBar
from headrace.cli.making.calibration_text import calibration_sequences
from headrace.cli.output_path import check_output_folder
from headrace.compress.calibration import BUNDLED_TEXT
from headrace.engine.executors.key_means import measure_key_offsets
from headrace.errors import RequestError
from headrace.models.key_offsets import key_shapes, write_key_offsets
from headrace.models.model_folder import find_model, open_model, with_expanded_kv


def kv_offsets(
    model: str,
    out: Path,
    /,
    *,
    calibrate: Path | None = None,
    calibrate_tokens: int = 4096,
    window: int | None = None,
    weights: str = "auto",
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
) -> None:
    """Measure what an int8 or int4 KV cache subtracts from a model's keys, to round them better.

    Usage: headrace kv-offsets path/to/model model.offsets.safetensors --calibrate prompts.jsonl

    The keys of a head point the same way, so a fixed vector less leaves smaller numbers to round. Attention does not
    change. Serve with kv = "int4" and kv_offsets = "model.offsets.safetensors", and check the gain with headrace
    evaluate --kv int4 --kv-offsets FILE.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft), or a downloaded model's name (see headrace pull).
    out
        File to write. It must not exist.
    calibrate
        Text file, or JSONL file of prompts as `headrace evaluate` reads them, that is like what the model will read.
        Default: a bundled English text about software.
    calibrate_tokens
        Measure on at most this many tokens.
    window
        Tokens of a sequence. Default: 512, or the model's context if that is shorter.
    weights
        Precision of the weights that compute the keys, as for headrace serve.
    threads
        Threads to compute with. Default: the machine's cores.
    """
    if out.exists():
        raise RequestError(f"{out} exists. Choose another name, or remove it first.", parameter="out")
    check_output_folder(out, "out")
    folder = open_model(find_model(model))
    if folder.spec.latent is not None:
        folder = with_expanded_kv(folder)
    key_shapes(folder.spec)
    documents = read_documents(calibrate or BUNDLED_TEXT)
    sequences = calibration_sequences(folder, documents, window, calibrate_tokens)
    with EvaluationBar() as bar:

        def watch(done: int, total: int) -> None:
            bar.show(EvaluationProgress("keys", done, total))

        offsets = measure_key_offsets(folder, sequences, weights=weights, threads=threads, watch=watch)
    text = "the bundled text" if calibrate is None else calibrate.name
    count = sum(map(len, sequences))
    about = {"model": folder.path.name, "measured_on": f"{count:,} tokens of {text}"}
    write_key_offsets(out, offsets, about)
    latent = "latent_kv = false, " if folder.spec.latent is not None else ""
    print(
        f"{out}: key offsets of {len(offsets.layers)} layers from {count:,} tokens of {text}. "
        f'Serve with {latent}kv = "int4", kv_offsets = "{out}".'
    )
