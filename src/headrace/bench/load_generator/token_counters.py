"""Counts tokens with a local tokenizer, or with the server's /tokenize endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, cast

import msgspec

from headrace.bench.client.http_client import HttpClient
from headrace.models.formats.json_file import read_json
from headrace.models.model_folder import find_model, open_tokenizer

_NO_BOUND: Final = 1 << 30  # vocabulary size without a config.json


class TokenCounter(Protocol):
    """Counts the tokens of a text, without special tokens."""

    name: str
    by: str  # tokenizer or server

    async def count(self, text: str) -> int: ...


class TokenizerCounter:
    """Counts with a local tokenizer."""

    by = "tokenizer"

    def __init__(self, model: str) -> None:
        self.name = model
        path = find_model(model)
        config = read_json(path / "config.json") if (path / "config.json").exists() else {}
        inner = config.get("text_config")
        if isinstance(inner, dict):
            config = {**cast("dict[str, object]", inner), **config}
        size = config.get("vocab_size")
        self._tokenizer = open_tokenizer(path, size if isinstance(size, int) else _NO_BOUND)

    async def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


class ServerTokenCounter:
    """Counts with the server's /tokenize, in the form of Headrace and vLLM, llama.cpp, or text-generation-inference."""

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

    async def detect(self) -> bool:
        """Return whether the server has a /tokenize, and remember its form."""
        for shape in self._shapes:
            if await self._request(shape("the wheel turns")):
                self._shapes = [shape]
                return True
        return False

    async def count(self, text: str) -> int:
        tokens = await self._request(self._shapes[0](text)) if text else 0
        if tokens is None:
            raise ConnectionError(f"{self._client.target.url}/tokenize worked at first and now fails")
        return tokens

    async def _request(self, body: dict[str, Any]) -> int | None:
        response = await self._client.fetch("POST", "/tokenize", body, self._headers)
        if response.error or response.status != 200:
            return None
        try:
            found: object = msgspec.json.decode(bytes(response.body))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if isinstance(found, list):
            return len(cast("list[object]", found))
        tokens = cast("dict[str, object]", found).get("tokens") if isinstance(found, dict) else None
        return len(cast("list[object]", tokens)) if isinstance(tokens, list) else None
