"""SmolVLM and Idefics3 against transformers: pixels, prompt tokens, features, logits and greedy tokens, in f32."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import CpuExecutor, memory_of
from headrace.engine.executors.executor import StepBatch
from headrace.engine.executors.image_encoder import ImageEncoder
from headrace.engine.interface.image_rows import ImageRows
from headrace.engine.interface.request import GenerationRequest
from headrace.errors import ModelError, RequestError
from headrace.models.model_folder import open_model
from headrace.models.packing import load_tensors
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.vision.encoding_memory import encoding_bytes
from headrace.models.vision.image_layout import ImageTexts
from headrace.models.vision.pixels import measure, read_tiles
from headrace.models.vision.vision_folder import VisionFolder, has_vision, open_vision, read_layout, tower_bytes
from headrace.variant import Variant
from tests.support.models.tiny_vision import HIDDEN, picture, write_vision_model
from tests.support.tiny_engine import one, open_tiny, run

Image = pytest.importorskip("PIL.Image", reason="the extra vision is not installed")

FORMS = {"smolvlm": ("smolvlm", True), "idefics3": ("idefics3", True), "whole": ("idefics3", False)}
SIZES = ((100, 60), (10, 10), (33, 200), (31, 29), (300, 7))  # of pictures: wide, small, tall, odd, far from square
PIXELS = 1_000_000


class Form:
    """A tiny model, here and in transformers."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.vision: VisionFolder = open_vision(folder)
        self.encoder = ImageEncoder(self.vision, threads=2)
        self.tokenizer = Tokenizer.load(folder, open_model(folder).spec.vocab_size)
        named = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[kind]
        preparation = getattr(transformers, f"{named}ImageProcessorPil").from_pretrained(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self.processor: Any = transformers.Idefics3Processor(
            preparation, tokenizer, image_seq_len=self.vision.tower.tile_tokens
        )
        model = getattr(transformers, f"{named}ForConditionalGeneration")
        self.reference: Any = model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def inputs(self, text: str, *data: bytes) -> Any:
        images = [Image.open(io.BytesIO(each)).convert("RGB") for each in data]
        return self.processor(images=[images], text=[text], return_tensors="pt")

    def prompt(self, text: str, *data: bytes) -> tuple[tuple[int, ...], tuple[ImageRows, ...]]:
        """Return the tokens of a text with <image> in it, and the features of its images."""
        layout, mark = self.vision.layout, self.vision.tower.image_token
        tokens: list[int] = []
        rows: list[ImageRows] = []
        images = iter(data)
        for token in self.tokenizer.encode(text, False):
            if token != mark:
                tokens.append(token)
                continue
            image = next(images)
            own = self.tokenizer.encode(
                layout.text(layout.grid(measure(image, PIXELS)), ImageTexts("<image>", "<image>", "")), False
            )
            places = [place for place, each in enumerate(own) if each == mark][:: layout.tile_tokens]
            features = self.encoder.encode(read_tiles(image, layout, PIXELS))
            for place, tile in zip(places, features, strict=True):
                digest = hashlib.sha256(image + bytes([place])).digest()
                rows.append(ImageRows(len(tokens) + place, layout.tile_tokens, digest, tile.tobytes()))
            tokens += own
        return tuple(tokens), tuple(rows)


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Form]:
    made: dict[str, Form] = {}

    def get(name: str) -> Form:
        if name not in made:
            kind, splits = FORMS[name]
            folder = write_vision_model(tmp_path_factory.mktemp(name), kind=kind, splits=splits)
            made[name] = Form(folder, kind)
        return made[name]

    return get


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORMS)
def test_pixels_tokens_and_features_are_those_of_transformers(
    name: str, size: tuple[int, int], form: Callable[[str], Form]
) -> None:
    made, image = form(name), picture(*size)
    expected = made.inputs("a <image> b", image)
    tiles = read_tiles(image, made.vision.layout, PIXELS)
    assert np.array_equal(tiles, expected["pixel_values"][0].numpy())
    tokens, _ = made.prompt("a <image> b", image)
    assert list(tokens) == expected["input_ids"][0].tolist()
    with torch.no_grad():
        found = made.reference.model.get_image_features(expected["pixel_values"], expected["pixel_attention_mask"])
    reference = torch.cat(list(found.pooler_output)).numpy()
    features = made.encoder.encode(tiles).reshape(-1, HIDDEN)
    assert relative_error(features, reference) < 1e-4


@pytest.mark.parametrize("name", FORMS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, form: Callable[[str], Form]) -> None:
    made = form(name)
    images = (picture(70, 40, 1), picture(20, 60, 2))
    text = "one <image> and <image> two"
    inputs = made.inputs(text, *images)
    tokens, rows = made.prompt(text, *images)
    with torch.no_grad():
        expected = made.reference(**inputs).logits[0].numpy()
        answer = made.reference.generate(**inputs, do_sample=False, max_new_tokens=64, min_new_tokens=64)
    folder = open_model(made.folder)
    executor = CpuExecutor.load(folder, weights="f32", kv="f32", threads=2, context=512, isa=None)
    assert relative_error(logits_of(executor, tokens, rows), expected) < 1e-4
    opened = open_tiny(made.folder, weights="f32", kv="f32", context=512)
    request = GenerationRequest(
        id="a", prompt=tokens, images=rows, max_tokens=64, min_tokens=64, stop_ids=frozenset({1})
    )
    found = one(opened.engine, request).tokens
    assert len(found) == 64
    assert found == answer[0, len(tokens) :].tolist()


def logits_of(executor: CpuExecutor, tokens: tuple[int, ...], rows: tuple[ImageRows, ...]) -> NDArray[np.float32]:
    places = np.full(len(tokens), -1, dtype=np.int32)
    for number, image in enumerate(rows):
        places[image.start : image.start + image.count] = range(number * image.count, (number + 1) * image.count)
    batch = StepBatch(
        tokens=np.array(tokens, dtype=np.int32),
        offsets=np.array([0, len(tokens)], dtype=np.int32),
        computed=np.zeros(1, dtype=np.int32),
        block_tables=np.arange(-(-len(tokens) // 16), dtype=np.int32)[None],
        rope_variants=np.zeros(1, dtype=np.int32),
        wanted=np.arange(len(tokens), dtype=np.int32),
        features=np.concatenate([np.frombuffer(each.data, dtype=np.float32).reshape(-1, HIDDEN) for each in rows]),
        feature_rows=places,
    )
    return executor.collect(executor.launch(batch)).values


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_answers_depend_on_no_batch_chunk_or_cache(form: Callable[[str], Form]) -> None:
    made = form("smolvlm")
    images = picture(70, 40, 1), picture(70, 40, 2)
    first, second = (made.prompt("see <image> this", image) for image in images)
    text = tuple(made.tokenizer.encode("see nothing at all", False))

    def request(id: str, prompt: tuple[tuple[int, ...], tuple[ImageRows, ...]]) -> GenerationRequest:
        return GenerationRequest(id=id, prompt=prompt[0], images=prompt[1], max_tokens=24, min_tokens=24)

    open_one = partial(open_tiny, made.folder, context=512)
    alone = [one(open_one().engine, request("x", each)).tokens for each in (first, second)]
    assert alone[0] != alone[1]
    engine = open_one(max_rows=32).engine  # prompts are computed in chunks that cut images apart
    together = run(engine, [request("a", first), request("t", (text, ())), request("b", second)])
    assert [together["a"][0].tokens, together["b"][0].tokens] == alone
    for id, prompt, tokens in (("c", first, alone[0]), ("d", second, alone[1])):
        again = one(engine, request(id, prompt))
        assert again.tokens == tokens
        assert again.ending is not None
        assert again.ending.usage.cached_tokens == len(prompt[0]) - 1  # the same image shares its KV
    third = made.prompt("see <image> this", picture(70, 40, 3))
    fresh = one(engine, request("e", third))
    assert fresh.ending is not None
    assert fresh.ending.usage.cached_tokens == third[1][0].start  # another image shares the text before it alone
    assert fresh.tokens == one(open_one().engine, request("e", third)).tokens


def test_features_depend_on_no_thread_count(form: Callable[[str], Form]) -> None:
    made = form("idefics3")
    tiles = read_tiles(picture(90, 50), made.vision.layout, PIXELS)
    single = ImageEncoder(made.vision, threads=1)
    assert np.array_equal(single.encode(tiles), made.encoder.encode(tiles))
    assert np.array_equal(single.encode(tiles[:1])[0], made.encoder.encode(tiles)[0])
    single.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rows: [ImageRows(rows[0].start, 99, b"", b"")], "outside the prompt"),
        (lambda rows: [rows[0], rows[0]], "overlap"),
        (lambda rows: [ImageRows(rows[0].start, rows[0].count, b"", rows[0].data[:-4])], "bytes of features"),
    ],
)
def test_features_that_do_not_fit_are_refused(change: Any, why: str, form: Callable[[str], Form]) -> None:
    made = form("smolvlm")
    tokens, rows = made.prompt("<image>", picture(10, 10))
    engine = open_tiny(made.folder).engine
    with pytest.raises(RequestError, match=why):
        engine.submit(GenerationRequest(id="a", prompt=tokens, images=tuple(change(rows))))


def test_images_that_cannot_be_read_are_refused() -> None:
    whole = picture(40, 40)
    for data, why in (
        (b"", "malformed"),
        (b"GIF89a", "malformed"),
        (b"<svg/>", "malformed"),
        (bomb(), "pixels"),
        (picture(101, 100), "images.pixels"),
    ):
        with pytest.raises(RequestError, match=why):
            measure(data, 10_000)
    assert measure(whole[: len(whole) // 2], PIXELS) == (40, 40)


def test_a_damaged_file_is_refused_when_it_is_decoded(form: Callable[[str], Form]) -> None:
    whole = picture(400, 400)
    with pytest.raises(RequestError, match="damaged"):
        read_tiles(whole[: len(whole) // 2], form("smolvlm").vision.layout, PIXELS)


def bomb() -> bytes:
    """A PNG of a few bytes that says that it has 100,000 x 100,000 pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_turned_photograph_is_read_as_it_is_shown(form: Callable[[str], Form]) -> None:
    upright = Image.open(io.BytesIO(picture(60, 30)))
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    upright.save(buffer, "JPEG", exif=exif, quality=95)
    assert measure(buffer.getvalue(), PIXELS) == (60, 30)
    layout = form("smolvlm").vision.layout
    assert len(read_tiles(buffer.getvalue(), layout, PIXELS)) == layout.grid(measure(buffer.getvalue(), PIXELS)).tiles


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("max_image_size", {"longest_edge": 64}, "image_size"),
        ("do_resize", False, "always"),
        ("do_sharpen", True, "does not know"),
        ("image_std", [0.5], "3 numbers"),
    ],
)
def test_another_preparation_is_refused(key: str, value: Any, why: str, tmp_path: Path) -> None:
    import json

    folder = write_vision_model(tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert has_vision(folder)
    with pytest.raises(ModelError, match=why):
        open_vision(folder)
    path.unlink()
    (folder / "processor_config.json").unlink()
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json"):
        read_layout(folder, _tower(folder))


def _tower(folder: Path) -> Any:
    from headrace.models.config_json import ConfigJson
    from headrace.models.families.vision.towers import read_tower

    return read_tower(ConfigJson.read(folder / "config.json"))


def test_the_image_part_counts_in_the_memory_of_a_served_model(tmp_path: Path) -> None:
    path = write_vision_model(tmp_path)
    vision = open_vision(path)
    plan = vision.plan()
    weights = load_tensors(vision.folder, plan, _core.Pool(1), cache=None).bytes
    extras = sum(values.nbytes for values in vision.extras.values())
    need = memory_of(open_model(path), Variant(model=str(path), context=64))
    assert tower_bytes(path) == weights + extras > 0
    side = vision.tower.side
    assert need.images == tower_bytes(path) + encoding_bytes(vision.tower, side**2)
    assert need.total == need.weights + need.kv + need.images
    (path / "preprocessor_config.json").write_text("{}")
    assert tower_bytes(path) == 0  # it is not loaded
