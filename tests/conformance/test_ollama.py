"""Ollama's own packages, for Python and for node, against /api."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.conformance.conftest import Server

HERE = Path(__file__).parent
QUESTION = [{"role": "user", "content": "What is paging?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 24}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url, timeout=120) as found:
        yield found


def test_a_stream_says_what_a_whole_answer_says(client: ollama.Client) -> None:
    whole = client.chat("mini", QUESTION, options=GREEDY)
    parts = list(client.chat("mini", QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    last = parts[-1]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    assert whole.eval_count is not None
    assert 0 < whole.eval_count <= 24
    assert last.total_duration is not None
    assert last.prompt_eval_duration is not None
    assert last.eval_duration is not None
    assert last.total_duration > last.prompt_eval_duration
    assert last.eval_count / last.eval_duration * 1e9 > 1


def test_generate_answers_as_chat_does_and_goes_on_with_its_context(client: ollama.Client) -> None:
    chat = client.chat("mini", QUESTION, options=GREEDY)
    first = client.generate("mini", "What is paging?", options=GREEDY)
    assert first.response == chat.message.content
    assert first.context is not None
    again = client.generate("mini", "And a block?", context=first.context, options=GREEDY)
    history = [
        *QUESTION,
        {"role": "assistant", "content": first.response},
        {"role": "user", "content": "And a block?"},
    ]
    assert again.response == client.chat("mini", history, options=GREEDY).message.content
    assert "".join(
        part.response or "" for part in client.generate("mini", "What is paging?", options=GREEDY, stream=True)
    ) == (first.response)
    raw = client.generate("mini", "Paging is", raw=True, options=GREEDY)
    assert raw.response
    assert raw.context is None


def test_a_schema_and_json_are_enforced(client: ollama.Client) -> None:
    asked = [{"role": "user", "content": "How warm is it in Oslo?"}]
    matched = json.loads(client.chat("mini", asked, format=SCHEMA, options={"num_predict": 200}).message.content or "")
    assert set(matched) == {"city", "degrees"}
    assert isinstance(matched["degrees"], int)
    text = client.generate("mini", "Reply in JSON.", format="json", options={"num_predict": 200, **{"temperature": 0}})
    assert (text.response or "").lstrip().startswith("{")


def test_a_stream_has_the_calls_of_a_whole_answer_and_takes_their_results(client: ollama.Client) -> None:
    """Whether the model calls the tool is its own decision."""

    def get_weather(city: str) -> str:
        """Get the weather in a city.

        Args:
          city: The city.
        """
        return f"7 degrees in {city}"

    question = {"role": "user", "content": "What is the weather in Oslo?"}
    options = {"temperature": 0, "num_predict": 100}
    answer = client.chat("mini", [question], tools=[get_weather], options=options).message
    streamed = list(client.chat("mini", [question], tools=[get_weather], options=options, stream=True))
    assert [call for part in streamed for call in part.message.tool_calls or ()] == list(answer.tool_calls or ())
    assert "".join(part.message.content or "" for part in streamed) == answer.content
    results = [{"role": "tool", "tool_name": "get_weather", "content": "7 degrees"} for _ in answer.tool_calls or ()]
    after = client.chat("mini", [question, answer, *results, *QUESTION], tools=[get_weather], options=GREEDY)
    assert after.done


def test_embeddings_are_those_of_the_other_endpoint(client: ollama.Client, base_url: str) -> None:
    import openai

    with openai.OpenAI(base_url=base_url, api_key="none") as other:
        expected = [each.embedding for each in other.embeddings.create(model="mini", input=["a", "b"]).data]
    found = client.embed("mini", ["a", "b"], truncate=True)
    assert [pytest.approx(list(vector), abs=1e-6) for vector in found.embeddings] == expected
    assert found.prompt_eval_count
    assert list(client.embeddings("mini", "a").embedding) == pytest.approx(expected[0], abs=1e-6)
    assert list(client.embed("mini", []).embeddings) == []
    assert len(client.embed("mini", "a", dimensions=8).embeddings[0]) == 8


def test_models_are_listed_and_described(client: ollama.Client) -> None:
    names = [model.model for model in client.list().models]
    assert "mini:latest" in names
    shown = client.show("mini")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.capabilities == ["completion", "tools"]
    (loaded,) = [model for model in client.ps().models if model.model == "mini:latest"]
    assert loaded.context_length == 2048
    assert loaded.size is not None
    assert loaded.size > 1_000_000
    assert client.pull("mini").status == "success"
    assert client.generate("mini").done_reason == "load"


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        (lambda client: client.chat("nobody", QUESTION), 404, "Unknown model 'nobody'"),
        (lambda client: list(client.chat("nobody", QUESTION, stream=True)), 404, "Unknown model 'nobody'"),
        (lambda client: client.chat("mini", QUESTION, options={"mirostat": 1}), 400, "options.mirostat"),
        (lambda client: client.chat("mini", [{**QUESTION[0], "images": ["aGk="]}]), 400, "images"),
        (lambda client: client.chat("mini", QUESTION, think=True), 400, "does not support thinking"),
        (lambda client: client.generate("mini", "a", suffix="b"), 400, "'suffix' is not supported"),
        (lambda client: client.pull("llama3"), 501, "pulls no models"),
        (lambda client: client.push("mini"), 501, "pushes no models"),
        (lambda client: client.create("mine", from_="mini"), 501, "creates no models"),
        (lambda client: client.copy("mini", "mine"), 501, "Add an alias"),
        (lambda client: client.delete("mini"), 501, "removes no models"),
    ],
)
def test_errors_are_the_clients_own(
    client: ollama.Client, call: Callable[[ollama.Client], Any], status: int, message: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=re.escape(message)) as caught:
        call(client)
    assert caught.value.status_code == status


# node

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(
    NODE is None or not (HERE / "node_modules" / "ollama").is_dir(),
    reason="node or its package ollama is not there: run `make services`",
)


def ask_node(script: str, server: Server) -> Any:
    """Run a script with a client `ollama`. It prints one JSON value."""
    head = f'import {{ Ollama }} from "ollama"; const ollama = new Ollama({{ host: "{server.url}" }});\n'
    return json.loads(run_node(head + script))


def run_node(script: str) -> str:
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--input-type=module", "--eval", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=HERE,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_node
def test_the_documented_script_works(server: Server) -> None:
    page = (HERE.parents[1] / "docs" / "how-to" / "use-ollama-clients.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```js\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert run_node(script.replace("http://localhost:8000", server.url)).strip()


@needs_node
def test_node_streams_and_embeds(server: Server, client: ollama.Client) -> None:
    found = ask_node(
        """
        const messages = [{ role: "user", content: "What is paging?" }];
        const options = { temperature: 0, num_predict: 24 };
        let text = "";
        let last;
        const stream = await ollama.chat({ model: "mini", messages, options, stream: true });
        for await (last of stream) text += last.message.content;
        const whole = await ollama.chat({ model: "mini", messages, options });
        const generated = await ollama.generate({ model: "mini:latest", prompt: "What is paging?", options });
        const embedded = await ollama.embed({ model: "mini", input: ["a", "b"] });
        const { models } = await ollama.list();
        const { version } = await ollama.version();
        console.log(JSON.stringify({ text, last, whole, generated, embedded, models, version }));
        """,
        server,
    )
    expected = client.chat("mini", QUESTION, options=GREEDY).message.content
    assert found["text"] == found["whole"]["message"]["content"] == found["generated"]["response"] == expected
    assert found["last"]["done"]
    assert found["last"]["eval_count"] == found["whole"]["eval_count"]
    assert len(found["embedded"]["embeddings"]) == 2
    assert "mini:latest" in [model["name"] for model in found["models"]]
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["version"])


@needs_node
def test_node_hears_errors_and_stops_streams(server: Server) -> None:
    found = ask_node(
        """
        const heard = {};
        await ollama.pull({ model: "llama3" }).catch(error => { heard.pull = error.status_code; });
        await ollama.chat({ model: "nobody", stream: true }).catch(error => { heard.chat = error.message; });
        const options = { temperature: 0, num_predict: 1000 };
        const messages = [{ role: "user", content: "What is paging?" }];
        const stream = await ollama.chat({ model: "mini", messages, options, stream: true });
        try {
          for await (const part of stream) { heard.first ??= part; stream.abort(); }
        } catch (error) { heard.stopped = error.name; }
        console.log(JSON.stringify(heard));
        """,
        server,
    )
    assert found["pull"] == 501
    assert "Unknown model 'nobody'" in found["chat"]
    assert found["first"]["done"] is False
    assert found["stopped"] == "AbortError"
