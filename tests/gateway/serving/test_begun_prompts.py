"""Prompts that go on with a text that the answer has already."""

from __future__ import annotations

from headrace.gateway.images.image_reader import MeasuredImage, PromptImage
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.engine_answering import _with_begun  # pyright: ignore[reportPrivateUsage]
from headrace.gateway.serving.exchange import Prompt
from headrace.models.vision.image_layout import ImageGrid, Size
from tests.support.dialect_exchanges import exchange_for, tokenizer


def test_a_prompt_keeps_its_images_before_the_text_that_was_begun() -> None:
    image = PromptImage(MeasuredImage(b"", b"", ImageGrid(Size(8, 8), Size(8, 8), 0, 0, 2)), (1,))
    exchange = exchange_for(TextRequest(model="mini", begun="Yes, it"))
    (prompt,) = _with_begun(exchange, [Prompt((5, 7, 7, 6), "asked", (image,))])
    assert prompt.images == (image,)
    assert prompt.tokens[:4] == (5, 7, 7, 6)
    assert tokenizer().decode(prompt.tokens[4:]) == "Yes, it"
    assert prompt.tail == "askedYes, it"
