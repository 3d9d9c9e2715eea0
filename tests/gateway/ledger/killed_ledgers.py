"""Kills processes that write a ledger, and prints what each had acknowledged before it died.

    python killing.py FOLDER ROUNDS SEED

It forks rather than starts each of them, because imports take longer than what they are killed in. Each child runs the
gateway's own code on the same files, recovers what the one before left, and says on a pipe what has returned:

    R id        reserve          P id tokens        sent          S id micros        settle
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.database import Database
from headrace.gateway.ledger.budgets import Admitted, BudgetBook, TenantBudgets
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.ledger.ledger_bounds import LedgerBounds
from headrace.gateway.ledger.ledger_records import LedgerEntry
from headrace.gateway.ledger.prices import Price, PriceBook
from headrace.gateway.ledger.sqlite import SqliteLedgerStore
from headrace.gateway.requests.text_request import TokenUsage

PRICE = Price(1_000_000, 250_000, 2_000_000)
PROMPT, CACHED = 10, 4
WORKERS = 8


def planned(id: str) -> int:
    """How many tokens an exchange will have."""
    return random.Random(id).randrange(12)


def accounts() -> BudgetBook:
    return BudgetBook(
        {
            "a": TenantBudgets(
                (BudgetConfig(limit_micros=10**9, period="day"), BudgetConfig(limit_micros=10**9, period="month"))
            )
        }
    )


async def child(folder: Path, round: int, pipe: int) -> None:
    ledger = Ledger(
        SqliteLedgerStore(Database(folder)),
        prices=PriceBook({"mini": PRICE}),
        accounts=accounts(),
        journal=folder / "ledger.journal",
        bounds=LedgerBounds(exchanges=64, gather_s=0.002, wait_s=5.0, sync_s=0.02),
    )

    def say(*words: object) -> None:
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    async def worker(number: int) -> None:
        for count in range(10**6):
            id = f"{round}-{number}-{count}"
            entry = LedgerEntry(id=id, tenant="a", endpoint="/e", model="m", variant="mini", prompt_tokens=PROMPT)
            if not isinstance(await ledger.reserve(entry, output_tokens=4), Admitted):
                await asyncio.sleep(0.001)  # as many wait to be written as there may be
                continue
            say("R", id)
            for tokens in range(1, planned(id) + 1):
                ledger.progress(id, tokens)
                ledger.sent(id, tokens)
                say("P", id, tokens)
                await asyncio.sleep(0)
            usage = TokenUsage(prompt_tokens=PROMPT, cached_tokens=CACHED, output_tokens=planned(id))
            receipt = ledger.settle(id, usage)
            say("S", id, receipt.micros)

    await ledger.open()
    say("O", round)
    await asyncio.gather(*map(worker, range(WORKERS)))


def killed(folder: Path, round: int, seconds: float, *, opened: bool) -> list[str]:
    """What a child said until it was killed, so long after it was started, or had opened its ledger."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            asyncio.run(child(folder, round, write))
        finally:
            os._exit(1)  # it is to be killed
    os.close(write)
    said, end = b"", time.monotonic() + (10.0 if opened else seconds)
    try:
        while (left := end - time.monotonic()) > 0:
            if select.select([read], [], [], left)[0]:
                some = os.read(read, 1 << 16)
                if not some:
                    raise RuntimeError("the child has ended by itself")
                said += some
                if opened and said.startswith(b"O "):
                    opened, end = False, time.monotonic() + seconds
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    while some := os.read(read, 1 << 16):
        said += some
    os.close(read)
    return said.decode().splitlines()


def main() -> None:
    folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.CRITICAL)
    chance = random.Random(seed)
    said: list[str] = []
    for round in range(rounds):
        said += killed(folder, round, chance.uniform(0.0, 0.15), opened=round % 4 != 3)
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
