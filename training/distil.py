"""What the draft learns from: mini's probabilities, and the answers that mini itself would give.

Owns Teacher. Its answers come from Headrace's own engine, where a sequence's tokens do not depend on its company, so
that the draft's corpus is as reproducible as mini's. Knows nothing of the training loop.
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
