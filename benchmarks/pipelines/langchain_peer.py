"""The same question answering on documentation twice: as a Headrace pipeline, and with LangChain around Headrace's API.

    python benchmarks/pipelines/langchain_peer.py --encoder FOLDER [--questions 20] [--deadlines 250,120] [--out FILE]

Both use one server, the same model, encoder, pages, passages and prompt size, and run turn by turn. LangChain
(`langchain-core`, `langchain-openai`) cuts nothing: it gets the passages that Headrace cut, in its in-memory store, and
gives the three best to the model. Then each has deadlines that the model cannot keep. Prints a Markdown page.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import openai
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests and benchmarks are no packages that are installed

from benchmarks.runs import commit, now
from headrace.bench.drills.drill_server import KEY, DrillServer

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ROOT / "docs" / "how-to"
INSTRUCTIONS: Final = "Answer from the sources only. Cite them like [1]."
KEEP: Final = 3
TOKENS: Final = 64
FREE_MS: Final = 60_000.0  # a deadline that is never reached

PIPELINE: Final = f"""
[pipelines.docs]
model = "mini"
stages = ["search", "assemble", "generate", "check"]
deadline_ms = 60000

[pipelines.docs.search]
collection = "docs"
budget_ms = 100
k = {KEEP}

[pipelines.docs.assemble]
keep = {KEEP}

[pipelines.docs.generate]
max_tokens = {TOKENS}
instructions = "{INSTRUCTIONS}"
"""
CONFIG: Final = """
[models.mini]
path = "mini"

[models.encoder]
path = "{encoder}"

[collections]
embedder = "encoder"
chunk_tokens = 100
overlap_tokens = 0
"""


class HeadraceApplication:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def answer(self, question: str, deadline_ms: float) -> tuple[str, bool]:
        body = {"input": question, "deadline_ms": deadline_ms}
        async with self._session.post(f"{self._url}/v1/pipelines/docs", json=body) as response:
            found = await response.json()
        if "error" in found:
            print(f"{response.status}: {found['error']['message']} ({found['error']['code']})", file=sys.stderr)
            return "", False
        return found["answer"], bool(found["citations"])


class LangChainApplication:
    def __init__(self, url: str, passages: list[str]) -> None:
        base, key = f"{url}/v1", SecretStr(KEY)
        embeddings = OpenAIEmbeddings(model="encoder", base_url=base, api_key=key, check_embedding_ctx_length=False)
        self._store = InMemoryVectorStore(embeddings)
        self._store.add_documents([Document(text) for text in passages])
        self._chat = ChatOpenAI(
            model="mini", base_url=base, api_key=key, temperature=0, max_retries=0, max_completion_tokens=TOKENS
        )

    async def answer(self, question: str, deadline_ms: float) -> tuple[str, bool]:
        async with asyncio.timeout(deadline_ms / 1e3):
            found = await self._store.asimilarity_search(question, k=KEEP)
            sources = "\n\n".join(f"[{place}] {each.page_content}" for place, each in enumerate(found, start=1))
            messages = [("system", INSTRUCTIONS), ("user", f"{sources}\n\n{question}")]
            answer = str((await self._chat.ainvoke(messages)).content)
        return answer, any(f"[{place}]" in answer for place in range(1, len(found) + 1))


Answer = Callable[[str, float], Any]


async def measure(answer: Answer, question: str, deadline_ms: float) -> tuple[float, str, bool]:
    began = time.perf_counter()
    try:
        text, is_cited = await answer(question, deadline_ms)
    except (TimeoutError, openai.APITimeoutError):
        text, is_cited = "", False
    return (time.perf_counter() - began) * 1e3, text, is_cited


async def run(encoder: str, count: int, deadlines: Sequence[float]) -> str:
    lines = Path(__file__).with_name("questions.jsonl").read_text().splitlines()[:count]
    asked = [msgspec.json.decode(line) for line in lines]
    pages = sorted({each["page"] for each in asked})
    async with (
        DrillServer(CONFIG.format(encoder=encoder) + PIPELINE, name="peer") as server,
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session,
    ):
        documents = [{"id": page, "text": (PAGES / page).read_text(), "type": "markdown"} for page in pages]
        await call(session, "POST", f"{server.url}/v1/collections", {"name": "docs"})
        await call(session, "POST", f"{server.url}/v1/collections/docs/documents", {"documents": documents})
        passages = await wait_for_passages(session, server.url, asked[0]["question"])
        headrace = HeadraceApplication(server.url, session)
        langchain = await asyncio.to_thread(LangChainApplication, server.url, passages)
        peers: dict[str, Answer] = {"Headrace's pipeline": headrace.answer, "LangChain": langchain.answer}
        found: dict[str, dict[float, list[tuple[float, str, bool]]]] = {name: {} for name in peers}
        for answer in peers.values():
            await measure(answer, asked[0]["question"], FREE_MS)
        for limit in (FREE_MS, *deadlines):
            for place, each in enumerate(asked):
                turn = list(peers.items())
                for name, answer in turn if place % 2 else reversed(turn):
                    found[name].setdefault(limit, []).append(await measure(answer, each["question"], limit))
    return report(found, len(passages), deadlines)


async def call(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    async with session.request(method, url, json=body) as response:
        if response.status >= 400:
            raise SystemExit(f"{method} {url}: {response.status} {await response.text()}")
        return await response.json()


async def wait_for_passages(session: aiohttp.ClientSession, url: str, question: str) -> list[str]:
    """Return the texts of all passages, once they can be searched."""
    while True:
        stats = (await call(session, "GET", f"{url}/v1/collections/docs"))["stats"]
        if stats["documents"]["ready"] and not stats["documents"]["pending"]:
            break
        await asyncio.sleep(0.5)
    body = {"query": question, "k": 100, "mode": "vector", "recall": "exact"}
    hits = (await call(session, "POST", f"{url}/v1/collections/docs/search", body))["data"]
    return [hit["text"] for hit in hits]


def report(
    found: dict[str, dict[float, list[tuple[float, str, bool]]]], passages: int, deadlines: Sequence[float]
) -> str:
    own, peer = (lines_of(inspect.getsource(each)) for each in (HeadraceApplication, LangChainApplication))
    code = {
        "Headrace's pipeline": f"{lines_of(PIPELINE)} of TOML, {own} of Python",
        "LangChain": f"{peer} of Python",
    }
    columns = "".join(f" answers within {limit:g} ms | slowest ms |" for limit in deadlines)
    rows: list[str] = []
    for name, by_limit in found.items():
        ms = sorted(each[0] for each in by_limit[FREE_MS])
        cells = [
            name,
            code[name],
            f"{statistics.median(ms):,.0f}",
            f"{ms[round(0.95 * (len(ms) - 1))]:,.0f}",
        ]
        for limit in deadlines:
            tight = by_limit[limit]
            cells.append(f"{sum(bool(text) for _, text, _ in tight)} of {len(tight)}")
            cells.append(f"{max(each[0] for each in tight):,.0f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            "# Headrace's pipeline beside LangChain",
            "",
            f"`python benchmarks/pipelines/langchain_peer.py`, {now()}, commit {commit()}, langchain-core "
            f"{version('langchain-core')}, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, "
            f"{passages} passages.",
            "",
            f"| | lines | p50 ms | p95 ms |{columns}",
            f"|---|---|---:|---:|{'---:|---:|' * len(deadlines)}",
            *rows,
        ]
    )


def lines_of(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True, help="folder of an encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--deadlines", default="250,120", help="in milliseconds")
    parser.add_argument("--out", type=Path, help="Markdown file")
    given = parser.parse_args()
    text = asyncio.run(run(given.encoder, given.questions, [float(each) for each in given.deadlines.split(",")]))
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
