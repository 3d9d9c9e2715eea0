"""Compares the chat-template sandbox with jinja2's own and with minijinja: `python -m benchmarks.chat_templates`.

Needs `pip install minijinja`. Prints the median time of a rendering by each, interleaved, and how many of the hostile
templates of the tests each stops. A child process renders each hostile template, for minijinja dies of some of them.
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jinja2.ext
import jinja2.sandbox
import minijinja

from headrace.models.model_folder import BUNDLED
from headrace.models.text.chat_template import ChatTemplate
from tests.models.text import test_chat_template as cases

FUEL = cases.TIGHT.ticks
PATIENCE_S, MEMORY = 8.0, 4 << 30


def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def refuse(message: str) -> None:
    raise ValueError(message)


def with_minijinja(source: str, fuel: int | None = None) -> Callable[..., str]:
    names = {"raise_exception": refuse, "strftime_now": lambda text: time.strftime(text)}
    environment = minijinja.Environment(
        templates={"t": source},
        filters={"tojson": tojson},
        globals=names,
        trim_blocks=True,
        lstrip_blocks=True,
        fuel=fuel,
    )
    return lambda **values: environment.render_template("t", **cases.SPECIAL, **values)


def with_jinja(source: str) -> Callable[..., str]:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(source)
    return lambda **values: template.render(**cases.SPECIAL, **values)


def chat(turns: int, words: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[turn % 2], "content": "word " * words} for turn in range(turns)]


def timings() -> None:
    mini = (BUNDLED / "mini" / "chat_template.jinja").read_text()
    for name, source, messages in (
        ("mini, 1 turn", mini, chat(1, 10)),
        ("mini, 21 turns", mini, chat(21, 100)),
        ("mistral, 201 turns", cases.MISTRAL, chat(201, 100)),
    ):
        ours = ChatTemplate(source, special_tokens=cases.SPECIAL)
        renderers = {
            "headrace": lambda ours=ours, messages=messages, **_: ours.render(messages),
            "jinja2": with_jinja(source),
            "minijinja": with_minijinja(source, fuel=2_000_000),
        }
        values = {"messages": messages, "tools": None, "add_generation_prompt": True}
        assert len({render(**values) for render in renderers.values()}) == 1, name
        taken: dict[str, list[float]] = {each: [] for each in renderers}
        for _ in range(200):
            for each, render in renderers.items():
                start = time.perf_counter()
                render(**values)
                taken[each].append(time.perf_counter() - start)
        print(name, {each: f"{statistics.median(times) * 1e6:.0f} µs" for each, times in taken.items()})


def attempt(engine: str, source: str, results: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    messages = [{"role": "user", "content": "x"}]
    try:
        if engine == "headrace":
            ChatTemplate(source, special_tokens={}, bounds=cases.TIGHT).render(messages)
        else:
            with_minijinja(source, FUEL)(messages=messages)
        results.put("rendered")
    except Exception:
        results.put("stopped")


def hostile() -> None:
    mark = next(m for m in cases.test_a_template_beyond_its_limits_is_stopped.pytestmark if m.name == "parametrize")
    for engine in ("headrace", "minijinja"):
        outcomes: Counter[str] = Counter()
        for source in mark.args[1]:
            results: Any = multiprocessing.Queue()
            process = multiprocessing.Process(target=attempt, args=(engine, source, results))
            process.start()
            try:
                outcomes[results.get(timeout=PATIENCE_S)] += 1
            except queue.Empty:
                outcomes["ran on or died"] += 1
            process.kill()
            process.join()
        print(engine, dict(outcomes))


if __name__ == "__main__":
    timings()
    hostile()
