"""Fixtures for tests of training: a tokenizer folder, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.stand_in import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder
