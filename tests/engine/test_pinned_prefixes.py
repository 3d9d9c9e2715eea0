"""Pinned prefixes that are saved: which file is whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_engine import open_tiny

PREFIX = tuple(range(3, 140))


@pytest.mark.parametrize("other", [{"weights": "int4"}, {"kv_block": 64}])
def test_variants_that_share_a_folder_keep_their_own_pins(
    other: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    def opened(options: dict[str, Any]) -> Any:
        return open_tiny(tiny_folder, threads=1, saved_prefixes=str(tmp_path), **options)

    for options in ({}, other):
        variant, done = opened(options), list[str | None]()
        variant.pins.pin(PREFIX, "", done.append)
        while not variant.engine.idle:
            for output in variant.engine.step():
                assert variant.pins.takes(output)
        assert done == [None]
        variant.engine.close()
    for options in ({}, other):
        variant = opened(options)
        assert variant.pins.restored_tokens == 128
        variant.engine.close()
