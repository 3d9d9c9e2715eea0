"""Creates the models in each form that an engine needs, from one folder of random weights per shape.

A model gets its final name only when it is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import places
from commands import CommandError, run
from engines import OFFLINE, THREADS

from headrace.models.synthetic.random_model import write_random_model

SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b")


def model(shape: str, form: str) -> Path:
    """Return the path of the shape's model in this form; create it if needed."""
    target = places.model(shape, form)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"part-{form}")  # the ending stays: programs look at it
    _remove(part)
    print(f"{shape}: making {form}", flush=True)
    try:
        _make(shape, form, part)
        part.rename(target)
    finally:
        _remove(part)
    return target


def _make(shape: str, form: str, target: Path) -> None:
    log = f"convert-{shape}-{form}"
    if form == "hf":
        write_random_model(shape, target, seed=0, dtype="bf16")
    elif form == "bf16.gguf":
        script = places.CONVERTERS / "gguf_file.py"
        run([places.python("transformers"), script, model(shape, "hf"), target], log=log)
    elif form.endswith(".gguf"):
        kind = form.removesuffix(".gguf")
        run([places.LLAMA_DRIVER, "--quantize", model(shape, "bf16.gguf"), target, kind, str(THREADS)], log=log)
    elif form == "w8a8":
        run([places.python("transformers"), places.CONVERTERS / "w8a8.py", model(shape, "hf"), target], log=log)
    elif form.startswith("openvino-"):
        weights = form.removeprefix("openvino-")
        details = ["--sym", "--group-size", "128", "--ratio", "1.0"] if weights == "int4" else []
        command: list[str | Path] = [
            places.environment("openvino") / "bin" / "optimum-cli", "export", "openvino", "--model", model(shape, "hf"),
            "--task", "text-generation-with-past", "--weight-format", weights, *details, target,
        ]  # fmt: skip
        run(command, log=log, env=OFFLINE)
        _check(target, "openvino_model.bin")
    else:
        raise CommandError(f"no way to make a model in the form {form}")


def _check(folder: Path, file: str) -> None:
    if not (folder / file).exists():
        raise CommandError(f"the export left no {file}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
