"""After kill -9 in any phase of a canary, the record, the routes, the evidence and the audit log agree."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.gateway.accounts.account_store import SqliteAccountStore
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.canary_policies import canary_updater
from headrace.gateway.database import Database
from headrace.gateway.routing.canary_routes import CanaryRoutes
from headrace.lab.online.canary_evidence import CanaryBounds, CanaryEvidence
from headrace.lab.online.canary_operations import CanaryOperations
from headrace.lab.online.lab_store import SqliteLabStore
from tests.support.running_server import asynchronous

PROGRAM = Path(__file__).with_name("killed_canaries.py")
ROOT = Path(__file__).parents[3]
SERVED = ("mini", "mini@new")
# What holds after so many commits: phase, percent, and the audit log's entries.
AFTER = (
    (None, None),
    ("running", 5.0),
    ("running", 25.0),
    ("running", 50.0),
    ("promoted", 100.0),
    ("rolled_back", None),
)
ENTRIES = ["canary.start", "canary.advance", "canary.advance", "canary.promote", "canary.roll_back"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 6))
def test_one_truth_is_left_after_a_kill(tmp_path: Path, number: int, when: str) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), str(tmp_path), str(number), when], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    commits = number - (when == "before")
    check(tmp_path, commits)


@asynchronous
async def check(folder: Path, commits: int) -> None:
    database = Database(folder)
    store = SqliteAccountStore(database)
    shared = AccountSync(store, poll_s=3600.0)
    routes = CanaryRoutes()
    shared.listen(canary_updater(routes, SERVED))
    await shared.start()
    try:
        phase, percent = AFTER[commits]
        record = CanaryOperations(shared, SERVED).get("mini")
        route = routes.by_control.get("mini")
        assert (None if record is None else record.phase) == phase
        assert (None if route is None else route.percent) == percent
        rows = (await store.audit(after=0, before=None, limit=100, newest=False)).rows
        assert [msgspec.json.decode(row.body)["what"] for row in rows] == ENTRIES[:commits]
        saved = await SqliteLabStore(database).load("canary mini")
        assert (saved is None) == (commits == 0 or saved is None)
        if record is not None and saved is not None:
            assert CanaryEvidence.unpack(record.run, CanaryBounds(), saved).arms["candidate"].requests == 7
    finally:
        await shared.close()
        await database.close()
