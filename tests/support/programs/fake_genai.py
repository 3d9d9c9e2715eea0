"""A stand-in for OpenVINO GenAI: its pipeline repeats the prompt's tokens, one in each step, letters as tokens."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

STOPPED_BY = "."


class GenerationStatus(enum.Enum):
    RUNNING = 0
    FINISHED = 1
    IGNORED = 2
    CANCEL = 3


class GenerationFinishReason(enum.Enum):
    NONE = 0
    STOP = 1
    LENGTH = 2


class StructuredOutputConfig:
    json_schema: str | None = None


class GenerationConfig:
    def __init__(self) -> None:
        self.max_new_tokens = 0
        self.temperature = 1.0
        self.top_p = 1.0
        self.stop_token_ids: set[int] = set()
        self.structured_output_config: StructuredOutputConfig | None = None

    def validate(self) -> None:
        if not 0.0 < self.top_p <= 1.0:
            raise RuntimeError(f"Check 'top_p' failed at config.cpp:343:\ntop_p must be positive, got {self.top_p}\n")


class Output:
    def __init__(self, token: int, reason: GenerationFinishReason) -> None:
        self.generated_ids = [token]
        self.finish_reason = reason


class Handle:
    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self.status = GenerationStatus.RUNNING
        self.outputs: list[Output] = []
        self._prompt = prompt
        self._most = most
        self._count = 0

    def step(self) -> None:
        if self.status != GenerationStatus.RUNNING:
            return
        token = self._prompt[self._count % len(self._prompt)]
        self._count += 1
        reason = GenerationFinishReason.NONE
        if chr(token) == STOPPED_BY:
            reason = GenerationFinishReason.STOP
        elif self._count == self._most:
            reason = GenerationFinishReason.LENGTH
        if reason != GenerationFinishReason.NONE:
            self.status = GenerationStatus.FINISHED
        self.outputs.append(Output(token, reason))

    def can_read(self) -> bool:
        return bool(self.outputs)

    def read(self) -> dict[int, Output]:
        return {0: self.outputs.pop(0)}

    def get_status(self) -> GenerationStatus:
        return self.status

    def cancel(self) -> None:
        self.status = GenerationStatus.CANCEL


class Tensor:
    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)
        self.shape = self.data.shape


class Encoded:
    def __init__(self, text: str) -> None:
        self.input_ids = Tensor([list(text.encode())])


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> Encoded:
        return Encoded(text)

    def get_vocab_vector(self) -> list[str]:
        return [chr(token) for token in range(256)]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, extra_context: dict[str, Any]
    ) -> str:
        if messages[0]["role"] == "nobody":
            raise RuntimeError("unknown role")
        return "".join(message["content"] for message in messages) + "".join(map(str, extra_context.values()))


class Metrics:
    cache_usage = 25.0


class Pipeline:
    """Steps when a test lets it."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.configs: list[GenerationConfig] = []
        self.failure: str | None = None
        self.rejection: str | None = None  # of the next requests
        self.holding: list[Handle] = []  # those with KV, which a step after their end frees

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def get_metrics(self) -> Metrics:
        return Metrics()

    def add_request(self, number: int, prompt: Tensor, config: GenerationConfig) -> Handle:
        if self.rejection is not None:
            raise RuntimeError(self.rejection)
        self.configs.append(config)
        self.handles.append(Handle(prompt.data[0].tolist(), config.max_new_tokens))
        self.holding.append(self.handles[-1])
        return self.handles[-1]

    def step(self) -> None:
        if self.failure is not None:
            raise RuntimeError(self.failure)
        for handle in self.handles:
            handle.step()
        self.holding = [handle for handle in self.holding if handle.status == GenerationStatus.RUNNING]
