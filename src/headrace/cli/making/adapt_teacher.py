"""Teacher: where `headrace adapt --distil-from` takes answers or predictions from. Asks nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from headrace.cli.lab.replay import api_key
from headrace.errors import RequestError
from headrace.lab.answering.model_server import AnswererSpec, parse_spec
from headrace.models.model_folder import ModelFolder, find_model, open_model

Distil = Literal["auto", "answers", "logits", "both"]


class Teacher:
    def __init__(
        self, name: str, *, answers: AnswererSpec | None, folder: ModelFolder | None, recording: Path | None, key: str
    ) -> None:
        self.name = name
        self.answers = answers  # None: it answers nothing
        self.folder = folder  # None: its predictions are not learnt
        self.recording = recording
        self.key = key

    @classmethod
    def of(
        cls, text: str | None, distil: Distil, student: ModelFolder, key_env: str | None, threads: int
    ) -> Teacher | None:
        if text is None:
            return None
        if Path(text).suffix == ".jsonl":
            if not Path(text).is_file():
                raise RequestError(f"There is no file {text}.", parameter="distil-from")
            if distil not in ("auto", "answers"):
                raise RequestError("A recording has answers only. Remove --distil.", parameter="distil")
            return cls(
                f"recorded answers of {Path(text).name}", answers=None, folder=None, recording=Path(text), key=""
            )
        spec = parse_spec(text, parameter="distil-from", options={"threads": threads})
        folder = None
        if spec.is_local and distil != "answers":
            folder = open_model(find_model(text.rpartition("@")[0] if "@" in Path(text).name else text))
            differs = folder.tokenizer.difference(student.tokenizer)
            if differs is not None and distil != "auto":
                raise RequestError(
                    f"The teacher's predictions cannot be learnt, because its tokenizer differs: {differs}. Pass "
                    "--distil answers.",
                    parameter="distil",
                )
            folder = folder if differs is None else None
        elif distil in ("logits", "both"):
            raise RequestError("A server gives answers only. Pass --distil answers.", parameter="distil")
        answers = None if folder is not None and distil != "both" else spec
        return cls(text, answers=answers, folder=folder, recording=None, key=api_key(key_env))
