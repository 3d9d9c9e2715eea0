"""`headrace.LLM` and `headrace.AsyncLLM`: use a model from a program, without a server.

LLM owns an engine in this process and runs requests to their end. AsyncLLM owns one or more worker processes and serves
many callers on one event loop. Both take texts, token ids and chats and return whole results; `stream` returns outputs
as they come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.llm.in_process import LLM as LLM
    from headrace.llm.in_workers import AsyncLLM as AsyncLLM

__all__ = ["LLM", "AsyncLLM"]


def __getattr__(name: str) -> Any:
    # Imported on first use: a server uses AsyncLLM alone.
    if name == "LLM":
        from headrace.llm.in_process import LLM

        return LLM
    if name == "AsyncLLM":
        from headrace.llm.in_workers import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'headrace.llm' has no attribute '{name}'")
