"""LangChain's ChatOpenAI and OpenAIEmbeddings, as an application uses them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field, SecretStr

NO_KEY = SecretStr("none")


@pytest.fixture
def chat(base_url: str) -> ChatOpenAI:
    return ChatOpenAI(model="mini", base_url=base_url, api_key=NO_KEY, max_retries=0, temperature=0, max_tokens=12)  # pyright: ignore


@tool
def get_time(zone: Literal["UTC", "CET"]) -> str:
    """The time in a zone."""
    return f"12:00 {zone}"


def test_invoke_answers_with_its_usage(chat: ChatOpenAI) -> None:
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage("What is time to first token?")])
    assert isinstance(answer.content, str)
    assert answer.usage_metadata is not None
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.response_metadata["model_name"] == "mini"


def test_a_stream_joins_to_the_answer(chat: ChatOpenAI) -> None:
    whole = chat.invoke("What is time to first token?")
    chunks = list(chat.stream("What is time to first token?", stream_usage=True))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    assert joined.content == whole.content
    assert isinstance(joined, AIMessageChunk)
    assert joined.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_stop_and_logprobs_are_passed_on(chat: ChatOpenAI) -> None:
    guided = chat.bind(extra_body={"guided_choice": ["alpha beta gamma"]}, logprobs=True)
    answer = guided.invoke("Say it.", stop=["gamma"])
    assert answer.content == "alpha beta "
    tokens = answer.response_metadata["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in tokens).decode() == "alpha beta "


def test_a_tool_is_called_and_its_result_read(chat: ChatOpenAI) -> None:
    forced: Any = chat.bind_tools([get_time], tool_choice="required", parallel_tool_calls=False, strict=True)
    question = HumanMessage("What time is it?")
    called = forced.bind(max_tokens=60).invoke([question])
    assert isinstance(called, AIMessage)
    (call,) = called.tool_calls
    assert call["name"] == "get_time"
    assert call["args"]["zone"] in ("UTC", "CET")
    result = get_time.invoke(call)
    assert isinstance(result, ToolMessage)
    last = chat.bind_tools([get_time], tool_choice="none").invoke([question, called, result])
    assert last.tool_calls == []


def test_streamed_calls_join_to_one(chat: ChatOpenAI) -> None:
    forced: Any = chat.bind_tools([get_time], tool_choice="get_time", parallel_tool_calls=False, strict=True)
    joined: Any = None
    for chunk in forced.bind(max_tokens=60).stream("What time is it?"):
        joined = chunk if joined is None else joined + chunk
    (call,) = joined.tool_calls
    assert call["name"] == "get_time"
    assert call["args"]["zone"] in ("UTC", "CET")


class Verdict(BaseModel):
    """Whether it is so."""

    yes: bool = Field(description="Whether it is so.")
    sure: Literal["very", "hardly"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(chat: ChatOpenAI, method: Any) -> None:
    chat.max_tokens = 80
    found = chat.with_structured_output(Verdict, method=method, strict=True).invoke("Is water wet?")
    assert isinstance(found, Verdict)


async def gathered(chat: ChatOpenAI) -> list[str]:
    return [str(each.content) for each in await chat.abatch(["One?", "Two?", "One?"])]


def test_an_async_batch_answers_in_order(chat: ChatOpenAI) -> None:
    import asyncio

    found = asyncio.run(gathered(chat))
    assert len(found) == 3
    assert found[0] == found[2]


def test_embeddings_of_texts_that_it_cuts_into_tokens_itself_or_not(base_url: str) -> None:
    model = OpenAIEmbeddings(model="mini", base_url=base_url, api_key=NO_KEY, check_embedding_ctx_length=False)
    one = model.embed_query("a wheel")
    assert model.embed_documents(["a river", "a wheel"])[1] == pytest.approx(one, abs=1e-6)
