"""Changes canaries and is killed (-9) in the midst of one: a program for test_canary_killed.

Arguments: the storage folder, the operation that is to be interrupted, and when: before or after its commit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from headrace.gateway.accounts.account_store import AccountChange, CommitResult, SqliteAccountStore
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.admin_operations import Actor
from headrace.gateway.database import Database
from headrace.lab.online.canary_evidence import CanaryBounds, CanaryEvidence
from headrace.lab.online.canary_operations import CanaryOperations, NewCanary
from headrace.lab.online.lab_store import SqliteLabStore

WHO = Actor("ops", "req_1")
STEPS = ("canary.start", "canary.advance", "canary.advance", "canary.promote", "canary.roll_back")


class Deadly(SqliteAccountStore):
    """Kills its process at the n-th commit."""

    at = 0
    when = ""

    async def commit(self, change: AccountChange) -> CommitResult:
        self.at -= 1
        if self.at == 0 and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = await super().commit(change)
        if self.at == 0 and self.when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done


async def main(folder: Path, number: int, when: str) -> None:
    database = Database(folder)
    store = Deadly(database)
    store.at, store.when = number, when
    shared = AccountSync(store, poll_s=3600.0)
    await shared.start()
    operations = CanaryOperations(shared, ("mini", "mini@new"))
    new = NewCanary(control="mini", candidate="mini@new", stages=(5.0, 25.0, 50.0))
    record = await operations.start(WHO, new)
    evidence = CanaryEvidence(record.run, CanaryBounds())
    evidence.arms["candidate"].requests = 7
    await SqliteLabStore(database).save("canary mini", evidence.pack())
    await operations.advance(WHO, "mini", record.run, "stage 2")
    await operations.advance(WHO, "mini", record.run, "stage 3")
    await operations.promote(WHO, "mini", "good")
    await operations.roll_back(WHO, "mini", "bad after all")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
