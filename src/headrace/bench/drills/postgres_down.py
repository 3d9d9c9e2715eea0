"""The drill `postgres-down`: two gateways share a budget in a Postgres that is slow, frozen or flapping.

Needs Postgres's programs on the machine. A proxy in front of the database delays its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.bench.drills.drill_client import ChatClient, ChatReply
from headrace.bench.drills.drill_server import KEY, DrillError, DrillServer, wait_for_port
from headrace.bench.drills.promises import Promise
from headrace.bench.drills.tcp_proxy import TcpProxy

LIMIT: Final = 10_000  # micros, the budget of each phase
CLIENTS: Final = 1000  # requests at once, over both gateways
WAIT_S: Final = 2.0  # ledger.wait_ms
RETURN_S: Final = 30.0  # by when every charge must be written after a fault
_ROUNDS: Final = 3  # requests of each client
_NOISE_S: Final = 10.0  # that a request may take beside its wait, with a thousand at once
PHASES: Final = ("well", "slow-100", "slow-500", "frozen", "flapping")
Ask = Callable[[int], Awaitable[ChatReply]]

_CONFIG: Final = f"""
[models.mini]

[prices.mini]
input = 1.0
output = 1.0

[limits]
requests = 4096

[ledger]
store = "postgres"
dsn_env = "HEADRACE_DRILL_POSTGRES"
wait_ms = {WAIT_S * 1e3:.0f}
"""
_TENANT: Final = """
[[tenants.{phase}.budgets]]
limit_micros = {limit}
period = "day"

[[keys]]
name = "{phase}"
key = "{phase}"
tenant = "{phase}"
"""


class Phase:
    """The clients' results and the charges of one phase."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.replies: list[ChatReply] = []
        self.spent = 0
        self.written_after_s: float | None = None

    @property
    def answered(self) -> int:
        return sum(reply.answered for reply in self.replies)

    @property
    def outcomes(self) -> str:
        counts = Counter("answered" if each.answered else f"{each.status} {each.code}" for each in self.replies)
        return ", ".join(f"{count} {what}" for what, count in counts.most_common())


async def run() -> list[Promise]:
    config = _CONFIG + "".join(_TENANT.format(phase=phase, limit=LIMIT) for phase in PHASES)
    async with _postgres() as port, TcpProxy(port) as proxy:
        environ = {"HEADRACE_DRILL_POSTGRES": f"postgresql://drill@127.0.0.1:{proxy.port}/postgres"}
        async with (
            DrillServer(config, environ=environ) as first,
            DrillServer(config, environ=environ) as second,
            ChatClient(first.url, KEY, connections=CLIENTS) as one,
            ChatClient(second.url, KEY, connections=CLIENTS) as two,
        ):
            phases = [await _run_phase(name, proxy, (one, two)) for name in PHASES]
    return [*(nothing_is_overspent(each) for each in phases), *_others(phases)]


def _others(phases: Sequence[Phase]) -> list[Promise]:
    return [
        what_is_rejected_can_be_retried(phases),
        no_request_waits_longer(phases),
        *(the_budget_can_be_spent(each) for each in phases if each.name not in ("frozen", "flapping")),
        charges_are_written(phases),
    ]


async def _run_phase(name: str, proxy: TcpProxy, clients: Sequence[ChatClient]) -> Phase:
    phase = Phase(name)

    async def client(number: int) -> None:
        for _ in range(_ROUNDS):
            own = clients[number % len(clients)]
            phase.replies.append(await own.chat(f"Hello, {number}.", key=name, max_tokens=4, cache="off"))

    proxy.delay_s = {"slow-100": 0.1, "slow-500": 0.5}.get(name, 0.0)
    if name in ("frozen", "flapping"):  # each gateway has a lease when it begins
        await asyncio.gather(*(own.chat("Hello.", key=name, max_tokens=4) for own in clients))
    running = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    if name == "frozen":
        proxy.freeze()
    while name == "flapping" and not all(task.done() for task in running):
        proxy.cut()
        await asyncio.sleep(0.5)
    await asyncio.gather(*running)
    proxy.resume()
    proxy.delay_s = 0.0
    answered = phase.answered + (len(clients) if name in ("frozen", "flapping") else 0)
    began = time.monotonic()
    while time.monotonic() - began < RETURN_S and phase.written_after_s is None:
        requests, phase.spent = await _usage(clients[0], name)
        if requests >= answered:
            phase.written_after_s = time.monotonic() - began
        else:
            await asyncio.sleep(0.2)
    return phase


async def _usage(client: ChatClient, tenant: str) -> tuple[int, int]:
    """Return a tenant's requests and micros, as they are written."""
    status, found = await client.send("GET", f"/admin/v1/usage?by=tenant&tenant={tenant}&format=json")
    rows: list[dict[str, Any]] = found["rows"] if status == 200 else []
    return sum(row["requests"] for row in rows), sum(row["micros"] for row in rows)


def nothing_is_overspent(phase: Phase) -> Promise:
    return Promise(
        f"{phase.name}: {CLIENTS} clients of two gateways spend at most {LIMIT} micros",
        f"{phase.spent} micros; {phase.outcomes}",
        0 < phase.spent <= LIMIT,
    )


def the_budget_can_be_spent(phase: Phase) -> Promise:
    return Promise(
        f"{phase.name}: a database that answers does not keep tenants from their budget",
        f"{phase.spent / LIMIT:.1%} of it was spent",
        phase.spent >= 0.9 * LIMIT,
        timed=True,
    )


def what_is_rejected_can_be_retried(phases: Sequence[Phase]) -> Promise:
    rejected = [each for phase in phases for each in phase.replies if not each.answered]
    return Promise(
        "rejected requests get 429 or 503, with Retry-After",
        f"{sum(each.refused for each in rejected)} of {len(rejected)} were",
        all(each.refused for each in rejected),
    )


def no_request_waits_longer(phases: Sequence[Phase]) -> Promise:
    longest = max((each.seconds for phase in phases for each in phase.replies), default=0.0)
    return Promise(
        f"no request waits for the database longer than {WAIT_S:g} s",
        f"the longest took {longest:.1f} s in all",
        longest <= WAIT_S + _NOISE_S,
        timed=True,
    )


def charges_are_written(phases: Sequence[Phase]) -> Promise:
    late = [each.name for each in phases if each.written_after_s is None]
    return Promise(
        f"every charge is written within {RETURN_S:g} s of the database's return",
        f"not in: {', '.join(late)}" if late else "they were",
        not late,
        timed=True,
    )


@contextlib.asynccontextmanager
async def _postgres() -> AsyncGenerator[int]:
    """Run a Postgres; yield its port."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])  # Debian has them in a folder per version
    initdb, postgres = shutil.which("initdb", path=path), shutil.which("postgres", path=path)
    if initdb is None or postgres is None:
        raise DrillError("This drill needs Postgres. Run `make services` to install it.")
    user: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="headrace-drill-"))
    try:
        if os.geteuid() == 0:  # Postgres does not run as root
            try:
                pwd.getpwnam("postgres")
            except KeyError:
                raise DrillError("Postgres does not run as root, and there is no user postgres.") from None
            shutil.chown(folder, "postgres", "postgres")
            user = {"user": "postgres", "group": "postgres", "extra_groups": [], "cwd": "/"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        quiet: dict[str, Any] = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL, **user}
        data = str(folder / "data")
        options = ("-D", data, "-U", "drill", "-A", "trust", "--no-sync")
        made = await asyncio.create_subprocess_exec(initdb, *options, **quiet)
        if await made.wait() != 0:
            raise DrillError("initdb failed.")
        settings = ("-p", str(port), "-h", "127.0.0.1", "-k", "", "-c", "fsync=off")
        process = await asyncio.create_subprocess_exec(postgres, "-D", data, *settings, **quiet)
        try:
            await wait_for_port(port, "postgres", process)
            yield port
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGQUIT)  # without waiting for connections
            await process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
