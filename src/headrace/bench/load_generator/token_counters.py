"""Who counts a server's tokens: a tokenizer folder here, the server's /tokenize, or the usage that its answers tell.

Owns the ways to count here and there. Knows nothing of how prompts are built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, cast

import msgspec

from headrace.bench.client.http_client import HttpClient
from headrace.models.formats.json_file import read_json
from headrace.models.model_folder import find_model
from headrace.models.text.tokenizer import Tokenizer

_NO_BOUND: Final = 1 << 30  # a vocabulary's size where no config.json says it


class TokenCounter(Protocol):
    """Tokens of a text without a beginning or an end."""

    name: str
    by: str  # tokenizer or server

    async def count(self, text: str) -> int: ...


class TokenizerCounter:
    """A tokenizer folder."""

    by = "tokenizer"

    def __init__(self, model: str) -> None:
        self.name = model
        folder = find_model(model)
        config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        inner = config.get("text_config")
        if isinstance(inner, dict):
            config = {**cast("dict[str, object]", inner), **config}
        size = config.get("vocab_size")
        self._tokenizer = Tokenizer.load(folder, size if isinstance(size, int) else _NO_BOUND)

    async def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


class ServerTokenCounter:
    """The server's /tokenize: as Headrace and vLLM have it, or llama.cpp's, or text-generation-inference's."""

    name = "the server's /tokenize"
    by = "server"

    def __init__(self, client: HttpClient, model: str, headers: Mapping[str, str]) -> None:
        self._client = client
        self._headers = headers
        self._shapes: list[Callable[[str], dict[str, Any]]] = [
            lambda text: {"model": model, "prompt": text, "add_special_tokens": False},
            lambda text: {"content": text, "add_special": False},
            lambda text: {"inputs": text, "add_special_tokens": False},
        ]

    async def found(self) -> bool:
        """Whether there is one; the shape that it takes is kept."""
        for shape in self._shapes:
            if await self._asked(shape("the wheel turns")):
                self._shapes = [shape]
                return True
        return False

    async def count(self, text: str) -> int:
        found = await self._asked(self._shapes[0](text)) if text else 0
        if found is None:
            raise ConnectionError(f"{self._client.target.url}/tokenize answered once, and then it did not")
        return found

    async def _asked(self, body: dict[str, Any]) -> int | None:
        answer = await self._client.fetch("POST", "/tokenize", body, self._headers)
        if answer.error or answer.status != 200:
            return None
        try:
            found: object = msgspec.json.decode(bytes(answer.body))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if isinstance(found, list):
            return len(cast("list[object]", found))
        tokens = cast("dict[str, object]", found).get("tokens") if isinstance(found, dict) else None
        return len(cast("list[object]", tokens)) if isinstance(tokens, list) else None
