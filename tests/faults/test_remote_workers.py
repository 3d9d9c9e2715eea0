"""Workers on other hosts that are cut off, stopped, drained and killed: the same bytes, and each token charged once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import Config, KeyConfig, ModelConfig, ServerConfig, StorageConfig, WorkersConfig
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process.client_errors import WorkerLostError
from headrace.engine.process.engine_client import ClientTimeouts, EngineClient
from headrace.engine.process.worker_address import WorkerTls
from headrace.errors import HeadraceError
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.serving import fingerprint
from headrace.models.model_folder import open_model
from headrace.server.server import Server
from headrace.variant import Variant
from tests.support.accounts import bearer
from tests.support.admin_server import ADMIN, ROOT
from tests.support.programs.certificates import CertificateAuthority
from tests.support.remote_workers import CuttingProxy, worker_host
from tests.support.running_server import CHAT, FakeEngine, Running, asynchronous, living, until
from tests.support.tiny_engine import open_tiny, run

OPTIONS = ("--weights", "int8", "--context", "512", "--threads", "1", "--drain-s", "20")
STREAMS = 8
# The silence that counts as a partition is short, so that the test need not wait long.
WAITS = ClientTimeouts(patience=60.0, silence=1.5, suspicion=0.5, ping=0.1, reconnect_most_remote=0.1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def requests(max_tokens: int = 80) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=str(n),
            prompt=tuple(5 + (n * 31 + place * 7) % 4000 for place in range(10 + n * 3)),
            max_tokens=max_tokens,
            ignore_eos=True,
            sampling=SamplingParams(temperature=float(n % 2), seed=n),
        )
        for n in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def undisturbed(tiny_folder: Path) -> list[SequenceResult]:
    opened = open_tiny(tiny_folder, context=512, kv_tokens=8192, speculation="ngram")
    answers = run(opened.engine, requests())
    opened.engine.close()
    return [answers[str(n)][0] for n in range(STREAMS)]


async def answered(client: EngineClient, disturb: list[tuple[int, Callable[[], None]]]) -> list[SequenceResult]:
    """All requests at once; each disturbance happens when so many tokens have come."""
    answers = [SequenceResult(0) for _ in range(STREAMS)]
    count = 0

    async def follow(request: GenerationRequest) -> None:
        nonlocal count
        async with client.stream(request) as stream:
            async for output in stream:
                answers[int(request.id)].add(output)
                count += len(output.tokens)
                while disturb and count >= disturb[0][0]:
                    disturb.pop(0)[1]()

    await asyncio.gather(*map(follow, requests()))
    assert not disturb
    return answers


def assert_same(found: list[SequenceResult], expected: list[SequenceResult]) -> None:
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert [answer.text for answer in found] == [answer.text for answer in expected]


def states(client: EngineClient) -> list[str]:
    return [replica.state for replica in client.replicas()]


@asynchronous
async def test_streams_continue_byte_for_byte_when_a_host_is_cut_off_stopped_drained_or_killed(
    tiny_folder: Path, authority: CertificateAuthority, cache: Path, tmp_path: Path, undisturbed: list[SequenceResult]
) -> None:
    server, tls = authority.issue("server"), authority.issue("worker")
    stranger = CertificateAuthority(tmp_path / "other").issue("server")
    foreign = WorkerTls(cert=stranger.cert, key=stranger.key, ca=tls.ca)
    expected = fingerprint.of_model(open_model(tiny_folder), Variant.of(str(tiny_folder), weights="int8"))
    async with (
        worker_host(tiny_folder, tls, cache, *OPTIONS) as first,
        worker_host(tiny_folder, tls, cache, *OPTIONS) as second,
        CuttingProxy(first.port) as proxy,
        EngineClient(
            [f"tls://127.0.0.1:{proxy.port}", second.address], tls=server, fingerprint=expected, waits=WAITS
        ) as client,
    ):
        await until(lambda: states(client) == ["ready", "ready"])
        # Without a certificate of the CA there is no connection, and with other files there is no request.
        async with EngineClient([second.address], tls=foreign, waits=WAITS) as other:
            with pytest.raises(WorkerLostError, match="No worker is connected"):
                await other.ready(0.5)
        async with EngineClient([second.address], tls=server, fingerprint="0123", waits=WAITS) as other:
            with pytest.raises(HeadraceError, match=f"fingerprint {expected}, expected 0123"):
                await other.ready()

        assert_same(await answered(client, [(STREAMS * 20, proxy.cut)]), undisturbed)
        assert states(client)[1] == "ready"
        proxy.heal()
        await until(lambda: states(client) == ["ready", "ready"])

        found = await answered(client, [(STREAMS * 20, lambda: first.signal(signal.SIGSTOP))])
        assert_same(found, undisturbed)
        first.signal(signal.SIGCONT)
        await until(lambda: states(client) == ["ready", "ready"])

        # The first host is killed, then the second has its eviction notice: it finishes what it has.
        found = await answered(client, [(STREAMS * 20, lambda: first.signal(signal.SIGKILL))])
        assert_same(found, undisturbed)
        assert await first.ended() == -signal.SIGKILL
        found = await answered(client, [(STREAMS * 20, lambda: second.signal(signal.SIGTERM))])
        assert_same(found, undisturbed)
        assert await second.ended() == 0


@asynchronous
async def test_each_token_is_charged_once_when_a_host_dies_and_another_is_drained(
    tiny_folder: Path, authority: CertificateAuthority, cache: Path, tmp_path: Path
) -> None:
    tls, mine = authority.issue("worker"), authority.issue("server")
    async with (
        worker_host(tiny_folder, tls, cache, *OPTIONS) as first,
        worker_host(tiny_folder, tls, cache, *OPTIONS, preemptible=True) as second,
    ):
        caller = KeyConfig(name="caller", key="caller-secret", tenant="red")
        config = Config(
            server=ServerConfig(port=0, heartbeat_s=2.0, worker_s=60.0),
            storage=StorageConfig(folder=str(tmp_path / "state")),
            keys=(ADMIN, caller),
            workers=WorkersConfig(cert_file=mine.cert, key_file=mine.key, ca_file=mine.ca),
            models={
                "tiny": ModelConfig(
                    path=str(tiny_folder),
                    options={"weights": "int8", "context": 512},
                    workers=(first.address, second.address),
                )
            },
        )
        server = Server(config)
        async with living(server, lambda task: Running(server, FakeEngine(), server.fleet, task)) as running:
            client = server.fleet.served["tiny"].engine
            assert isinstance(client, EngineClient)
            await until(lambda: states(client) == ["ready", "ready"])

            async def chat(seed: int, surface: str = "chat") -> tuple[str, int]:
                wish = {"max_tokens": 100, "ignore_eos": True, "seed": seed, "temperature": 1.0, "surface": surface}
                answer = await running.ask("POST", "/v1/chat/completions", CHAT | wish, **bearer("caller-secret"))
                assert answer.status == 200, answer.body
                return answer.json["choices"][0]["message"]["content"], answer.json["usage"]["total_tokens"]

            async def admin(method: str, path: str, body: dict[str, str] | None = None) -> dict[str, object]:
                answer = await running.ask(method, f"/admin/v1/{path}", body, **bearer(ROOT))
                assert answer.status == 200, answer.body
                return answer.json

            def requests_at(place: int) -> int:
                return client.replicas()[place].requests

            # Batch work goes to the preemptible host, and everything else to the other.
            asked = [asyncio.create_task(chat(seed, "batch")) for seed in range(3)]
            asked += [asyncio.create_task(chat(seed)) for seed in range(3)]
            await until(lambda: (requests_at(0), requests_at(1)) == (3, 3))
            calm = await asyncio.gather(*asked)
            assert calm[:3] == calm[3:]

            asked = [asyncio.create_task(chat(seed)) for seed in range(3)]
            await until(lambda: requests_at(0) == 3)
            first.signal(signal.SIGKILL)
            assert await asyncio.gather(*asked) == calm[:3]  # on the preemptible host: nothing else is left
            listed = await admin("GET", "workers")
            assert [worker["state"] for worker in listed["data"]] == ["down", "ready"]  # type: ignore[attr-defined]

            asked = [asyncio.create_task(chat(seed)) for seed in range(3)]
            await until(lambda: requests_at(1) == 3)
            assert (await admin("POST", "workers/drain", {"address": second.address}))["models"] == ["tiny"]
            assert states(client)[1] == "draining"
            assert await asyncio.gather(*asked) == calm[:3]
            assert await second.ended() == 0  # told by the server, the host ends as after SIGTERM
            missing = await running.ask("POST", "/admin/v1/workers/drain", {"address": second.address}, **bearer(ROOT))
            assert missing.status == 400

            ledger = server.services.ledger
            assert isinstance(ledger, Ledger)
            (row,) = (await admin("GET", "usage?format=json&by=tenant"))["rows"]  # type: ignore[misc]
            assert (row["requests"], row["output_tokens"]) == (12, 1200), row
