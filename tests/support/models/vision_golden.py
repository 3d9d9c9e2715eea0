"""A tiny model with images, here and in transformers, for golden tests: weights, tokenizer, prompts, logits."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headrace.config import ImagesConfig
from headrace.engine.executors.batch_builder import BatchBuilder
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.image_encoder import ImageEncoder
from headrace.engine.interface.image_rows import ImageRows
from headrace.engine.interface.request import GenerationRequest, open_sequence
from headrace.engine.scheduling.step_plan import Share, StepPlan
from headrace.gateway.images.image_reader import ImageReader
from headrace.models.model_folder import open_model
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.vision.vision_folder import VisionFolder, open_vision
from tests.support.models.tiny_vision import data_url
from tests.support.tiny_engine import one, open_tiny

Prompt = tuple[tuple[int, ...], tuple[ImageRows, ...]]


def write_tokenizer(folder: Path, special: Sequence[str], template: str) -> int:
    """Write a tokenizer of bytes, in which runs of line ends are one token. Return the size of its vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {text: id for id, text in enumerate([*special, *alphabet, "ĊĊ", "ĊĊĊ"])}
    made = tokenizers.Tokenizer(models.BPE(tokens, [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[1],
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return len(tokens)


def write_weights(folder: Path, model: Any) -> None:
    """Save a model of transformers with weights that are far enough from zero for its parts to count."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            near = 1.0 if "norm" in name and name.endswith("weight") and "Gemma" not in type(model).__name__ else 0.0
            spread = 0.05 if "embed_tokens" in name else 0.2  # a tied head would repeat its token for ever
            weight.copy_(near + spread * torch.randn_like(weight))
    model.save_pretrained(folder)


class GoldenVision:
    """The model in a folder, and what transformers makes of it."""

    def __init__(self, folder: Path, processor: Any, model: Any) -> None:
        self.folder = folder
        self.vision = open_vision(folder)
        self.encoder = ImageEncoder(self.vision, threads=2)
        self.tokenizer = Tokenizer.load(folder, open_model(folder).spec.vocab_size)
        self.processor = processor
        self.reference: Any = model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def inputs(self, text: str, *data: bytes) -> Any:
        from PIL import Image

        images = [Image.open(io.BytesIO(each)).convert("RGB") for each in data]
        return self.processor(images=images, text=[text], return_tensors="pt")

    def chat(self, *parts: str | bytes) -> tuple[str, Prompt]:
        """Return a chat of one message as text for transformers, and as the server makes a prompt of it."""
        return asyncio.run(_chat(ImageReader("tiny", self.vision, self.encoder, self.tokenizer, ImagesConfig()), parts))

    @cached_property
    def executor(self) -> CpuExecutor:
        return CpuExecutor.load(open_model(self.folder), weights="f32", kv="f32", threads=2, context=512)

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """Return the logits of every token of a prompt that is computed in one step."""
        spec, executor = self.executor.spec, self.executor
        sequence = open_sequence(GenerationRequest(id="a", prompt=prompt[0], images=prompt[1]))
        count = len(prompt[0])
        builder = BatchBuilder(
            executor.capacity,
            spec.vocab_size,
            spec.hidden_size,
            1,
            feature_size=spec.feature_size,
            spans=spec.image_span > 0,
            places=spec.has_places,
        )
        sequence.blocks = list(range(-(-count // 16)))
        batch = builder.build(StepPlan([Share(sequence, count, count)], [], 0.0), [builder.row()])
        return executor.collect(executor.launch(batch)).values.copy()

    def check(self, *parts: str | bytes) -> None:
        """Check prompt, logits and greedy tokens of a chat of one message against transformers."""
        text, prompt = self.chat(*parts)
        inputs = self.inputs(text, *(part for part in parts if isinstance(part, bytes)))
        assert list(prompt[0]) == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            expected = self.reference(**inputs).logits[0].numpy()
            answer = self.reference.generate(**inputs, do_sample=False, max_new_tokens=64, min_new_tokens=64)
        assert relative_error(self.logits(prompt), expected) < 1e-4
        engine = open_tiny(self.folder, weights="f32", kv="f32", context=512).engine
        assert one(engine, request_with_images("a", prompt, 64)).tokens == answer[0, len(prompt[0]) :].tolist()


def request_with_images(id: str, prompt: Prompt, count: int = 24) -> GenerationRequest:
    return GenerationRequest(
        id=id, prompt=prompt[0], images=prompt[1], max_tokens=count, min_tokens=count, stop_ids=frozenset({1})
    )


def prompt_of(path: Path, vision: VisionFolder, *parts: str | bytes) -> Prompt:
    """Return a chat of one message as the server makes a prompt of it."""
    encoder = ImageEncoder(vision, threads=2)
    reader = ImageReader("tiny", vision, encoder, open_model(path).tokenizer, ImagesConfig())
    return asyncio.run(_chat(reader, parts))[1]


async def _chat(reader: ImageReader, parts: Sequence[str | bytes]) -> tuple[str, Prompt]:
    content = "".join("\ufffc" if isinstance(part, bytes) else part for part in parts)
    images = [{"url": data_url(part)} for part in parts if isinstance(part, bytes)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content, "images": images}]
    tokenizer = reader.tokenizer
    text = tokenizer.apply_template(reader.template_messages(messages))
    tokens = tuple(tokenizer.encode_chat(reader.framed(text), "tenant"))
    placed, images_of_prompt = reader.placed(tokens, await reader.measured(images))
    return text, (placed, await reader.rows("tenant", images_of_prompt))


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())
