"""`headrace drill`: its exit code, its JSON, and a playbook for each drill."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from headrace.bench.drills.promises import Promise
from headrace.cli import main
from headrace.cli.drill import DRILLS, FAULTS, DrillName

PLAYBOOKS = Path(__file__).parents[2] / "docs"


def test_a_broken_promise_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> list[Promise]:
        return [Promise("it holds", "it does", kept=True), Promise("it stays", "it does not", kept=False, timed=True)]

    monkeypatch.setitem(DRILLS, "overload", run)
    with pytest.raises(SystemExit) as ended:
        main(["drill", "overload"])
    assert ended.value.code == 1
    assert "it stays" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["drill", "overload", "--json"])
    assert json.loads(capsys.readouterr().out) == {
        "drill": "overload",
        "promises": [
            {"promised": "it holds", "found": "it does", "kept": True},
            {"promised": "it stays", "found": "it does not", "kept": False},
        ],
    }


def test_every_drill_has_its_playbook() -> None:
    (playbooks,) = PLAYBOOKS.rglob("playbooks.md")
    assert set(FAULTS) == set(DRILLS) == set(get_args(DrillName))
    assert set(re.findall(r"^headrace drill (\S+)", playbooks.read_text(), re.MULTILINE)) == set(DRILLS)
