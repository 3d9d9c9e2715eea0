"""Teaches draft from mini: mini's probabilities, and the answers that mini gives.

Answers come from Headrace's engine, where batching does not change a sequence's tokens, so draft's corpus is as
reproducible as mini's. Does not know the training loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.models.model_folder import open_model
from training.decoder import Decoder
from training.evaluate import greedy_answers, load
from training.files import read_model


@dataclass(frozen=True)
class Teacher:
    decoder: Decoder  # gives probabilities
    executor: CpuExecutor  # gives answers
    stop: frozenset[int]

    @classmethod
    def load(cls, folder: Path, threads: int | None = None) -> Teacher:
        model = open_model(folder)
        return cls(read_model(folder), load(model, "bf16", "bf16", threads), model.tokenizer.eos_ids)

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        return greedy_answers(self.executor, prompts, self.stop)
