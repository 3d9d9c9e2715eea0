"""What a running server records, of whom, and that it never waits for the disk."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from headrace.config import KeyConfig
from headrace.config.lab.recording_section import RecordingConfig
from headrace.config.tenant_section import TenantConfig
from headrace.lab.recording.recorded_request import RecordedRequest
from headrace.lab.recording.recorder import Recorder
from headrace.lab.recording.recording_store import RecordingStore
from tests.support.caching_server import BLUE, BOSS, KEYS, RED, Caching, caching
from tests.support.config_text import mistakes
from tests.support.running_server import asynchronous, until, words

RECORDED = {"red": TenantConfig(record=True)}


def recorder_of(running: Caching) -> Recorder:
    [found] = [each for each in running.server.services.answer_observers if isinstance(each, Recorder)]
    return found


def store_at(folder: Path) -> RecordingStore:
    return RecordingStore(folder, most_bytes=1 << 20, days=1.0)


def records(folder: Path, tenant: str = "red") -> list[RecordedRequest]:
    return list(store_at(folder).read(tenant))


def recording(folder: Path, **sections: Any) -> Any:
    return caching(folder, **{"tenants": RECORDED, **sections})


@asynchronous
async def test_a_request_of_a_tenant_that_opted_in_is_recorded_with_its_answer(tmp_path: Path) -> None:
    async with recording(tmp_path) as running:
        running.engine.answer = words("Hello ", "you")
        await running.chat("Write to ada@example.org", key=RED, max_tokens=9, stream=True)
        await running.chat("Not recorded", key=BLUE)
        await until(lambda: running.counted("headrace_recorded_total", "written") == 1, 5.0)
        [found] = records(tmp_path)
        assert found.body["messages"] == [{"role": "user", "content": "Write to [redacted email]"}]
        assert (found.body["max_tokens"], found.body["temperature"]) == (9, 0.0)
        assert not {"stream", "user", "cache_salt"} & set(found.body)
        assert (found.tenant, found.variant, found.endpoint) == ("red", "mini", "/v1/chat/completions")
        [answer] = found.answers
        assert answer.text == "Hello you"
        assert answer.e2el_s is not None
        assert answer.e2el_s > 0.0
        assert [each.tenant for each in store_at(tmp_path).tenants()] == ["red"]


@asynchronous
async def test_formats_sources_and_completions_are_recorded_as_requests_that_can_be_sent_again(tmp_path: Path) -> None:
    async with recording(tmp_path) as running:
        running.engine.answer = words("ok")
        schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        sources = [{"id": "a", "text": "A fact."}]
        first = await running.chat("Hello", key=RED, response_format=form, sources=sources)
        assert first.status == 200, first.body
        other = await running.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 3}, **RED)
        assert other.status == 200, other.body
        await until(lambda: running.counted("headrace_recorded_total", "written") == 2, 5.0)
        chat, completion = records(tmp_path)
        assert chat.body["response_format"] == form
        assert chat.body["sources"] == [{"id": "a", "text": "A fact.", "score": None}]
        assert (completion.endpoint, completion.body["prompt"]) == ("/v1/completions", "Once")
        answer = await running.ask("POST", "/v1/chat/completions", {**chat.body, "model": "mini"}, **RED)
        assert answer.status == 200, answer.body


@asynchronous
async def test_a_stuck_disk_delays_no_answer_and_drops_are_counted(tmp_path: Path) -> None:
    async with recording(tmp_path, recording=RecordingConfig(queue=1)) as running:
        running.engine.answer = words("ok")
        entered, go_on = threading.Event(), threading.Event()
        store = recorder_of(running)._store
        append = store.append

        def stuck(record: RecordedRequest) -> int:
            entered.set()
            go_on.wait(60.0)
            return append(record)

        store.append = stuck  # type: ignore[method-assign]
        for number in range(4):
            assert (await running.chat(f"Question {number}", key=RED)).status == 200
            await until(entered.is_set)
        assert running.counted("headrace_dropped_total", "recordings") == 2
        go_on.set()
        await until(lambda: running.counted("headrace_recorded_total", "written") == 2, 5.0)


@asynchronous
async def test_deleting_a_tenant_deletes_its_recordings(tmp_path: Path) -> None:
    async with caching(tmp_path, keys=(*KEYS, KeyConfig(name="x", key="x-secret"))) as running:
        running.engine.answer = words("ok")
        made = await running.ask("POST", "/admin/v1/tenants", {"name": "acme", "record": True}, **BOSS)
        assert made.status == 200, made.body
        key = await running.ask("POST", "/admin/v1/keys", {"name": "k", "tenant": "acme"}, **BOSS)
        await running.chat("Hello", key={"authorization": f"Bearer {key.json['secret']}"})
        await until(lambda: running.counted("headrace_recorded_total", "written") == 1, 5.0)
        assert len(records(tmp_path, "acme")) == 1
        assert (await running.ask("DELETE", "/admin/v1/tenants/acme", **BOSS)).status == 200
        await until(lambda: not store_at(tmp_path).tenants())


@asynchronous
async def test_a_share_of_none_records_nothing_and_unnamed_requests_need_their_own_switch(tmp_path: Path) -> None:
    async with recording(tmp_path, recording=RecordingConfig(share=0.0)) as running:
        running.engine.answer = words("ok")
        await running.chat("Hello", key=RED)
    assert records(tmp_path) == []
    async with caching(tmp_path, keys=(), recording=RecordingConfig(unnamed=True)) as running:
        running.engine.answer = words("ok")
        await running.chat("Hello")
    assert len(records(tmp_path, "")) == 1  # written before the server has ended


@asynchronous
async def test_long_requests_are_not_recorded(tmp_path: Path) -> None:
    async with recording(tmp_path, recording=RecordingConfig(record_bytes=2000)) as running:
        running.engine.answer = words("ok")
        await running.chat("x" * 2000, key=RED)
        assert running.counted("headrace_recorded_total", "too_long") == 1


def test_mistakes_in_the_section_are_named() -> None:
    text = '[recording]\nredact_patterns = ["ok", "("]\nkey_env = "NO_SUCH_KEY"\n'
    first, second = mistakes(text)
    assert "recording.redact_patterns[1]: not a regular expression" in first
    assert "recording.key_env: The environment variable NO_SUCH_KEY is not set" in second
