"""Tokenizers of each kind, and compilers of grammars for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.engine.grammar.constraints import GrammarCompiler
from headrace.models.text.tokenizer import Tokenizer
from tests.support.models.small_tokenizers import MAKERS, load


@pytest.fixture(scope="session")
def tokenizers_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: load(tmp_path_factory.mktemp("tokenizer"), make()) for name, make in MAKERS.items()}


@pytest.fixture(scope="module", params=list(MAKERS))
def each_kind(request: pytest.FixtureRequest, tokenizers_of: dict[str, Tokenizer]) -> Iterator[GrammarCompiler]:
    grammars = GrammarCompiler(tokenizers_of[request.param])
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def tokenizer(tokenizers_of: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_of["byte level"]


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    grammars = GrammarCompiler(tokenizer)
    yield grammars
    grammars.close()
