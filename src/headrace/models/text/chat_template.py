"""Renders chat messages into the text that a model reads, with the semantics of transformers' apply_chat_template.

The sandbox decides what a template may do, and RenderBudget how much. Does not know which texts are control tokens: see
ControlTokens.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, cast

import jinja2
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from headrace.errors import RequestError, TemplateError
from headrace.models.text.template_bounds import (
    ITEM,
    RENDER_BUDGET,
    BoundsExceededError,
    RenderBudget,
    TemplateBounds,
    WeighedList,
    weigh,
)
from headrace.models.text.template_outline import (
    MAX_CHARACTERS,
    MAX_MESSAGES,
    MAX_ROLE_CHARACTERS,
    Outline,
    Outlines,
    Shape,
    trace,
    tracing_sandbox,
)
from headrace.models.text.template_sandbox import sandbox
from headrace.models.text.user_text import ROLES, as_user_text, join, plain

SOURCE_LIMIT: Final = 128 * 1024  # characters; the largest templates in use have about 30 thousand
DEFAULT_BOUNDS: Final = TemplateBounds()
_REASON_LENGTH: Final = 300  # characters
_FILENAME: Final = "<template>"  # jinja's name in tracebacks for a template without a file
# Directives without a width, because glibc pads to a width of any size.
_TIME_FORMAT: Final = re.compile(r"(?:[^%]|%[-_0^#]?[a-zA-Z%])*")
# Names of a message's reasoning in clients and older templates; the first is standard.
_SIMPLE: Final = frozenset({bool, int})  # types of extra values of which chats of the same shape have the same
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


class _SimpleChat(NamedTuple):
    """A chat whose messages have a role and a text, and no more."""

    shape: Shape
    roles: tuple[str, ...]
    contents: tuple[str, ...]

    def texts(self) -> list[str]:
        """Return the texts of the request, as the sandbox sees them."""
        return ["role", "content", *self.roles, *self.contents]


class _RaisedError(Exception):
    """The template called raise_exception to reject the messages."""


class ChatTemplate:
    """A compiled chat template. Several threads may render it at once."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        path: Path | str | None = None,
        bounds: TemplateBounds = DEFAULT_BOUNDS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._path = path
        self._bounds = bounds
        self._now = now
        self.uses_clock = "strftime_now" in source  # the same messages may give another prompt later
        self._outlines = Outlines()
        self._traced: jinja2.Template | None = None
        if len(source) > SOURCE_LIMIT:
            raise TemplateError(f"The chat template is longer than {SOURCE_LIMIT} characters.", path=path)
        try:
            self._code, self.literals = sandbox().prepare(source)
            self._template = sandbox().template(self._code)
        except TemplateSyntaxError as error:
            raise self._error(f"has a syntax error: {error.message} (line {error.lineno})") from None
        except RecursionError:
            raise self._error("is nested too deep") from None
        except (Exception, MemoryError) as error:  # jinja and Python's compiler raise many types for a hostile source
            raise self._error(f"cannot be compiled: {type(error).__name__}: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        forges: Callable[[Sequence[str]], bool] | None = None,
        /,  # `extra` comes from requests and may have any name in it
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Return the prompt. Raises RequestError if the template rejects the messages, TemplateError if it fails.

        `forges` gets the texts of the request. If it says that they could be read as control tokens, the prompt is a
        UserText, which knows them from the template's.
        """
        chat = _simple_chat(messages, tools, add_generation_prompt, extra)
        if chat is not None:
            if forges is not None and forges(chat.texts()):
                chat = None  # its user text has to be followed through the template
            elif (prompt := self._outlines.find(chat.shape, chat.contents, self._strftime_now)) is not None:
                return prompt
        texts: list[str] = []
        values: dict[str, Any] = {
            **self._special_tokens,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "documents": None,
        }
        given: dict[str, Any] = {name: _plain(value, name, texts) for name, value in extra.items()}
        given["messages"] = _with_reasoning(_plain(list(messages), "messages", texts))
        given["tools"] = None if tools is None else _plain(list(tools), "tools", texts)
        tracks = forges is not None and forges(texts)
        if tracks:
            given = {name: as_user_text(value) for name, value in given.items()}
            for message in given["messages"]:
                if (role := message.get("role")) in ROLES:
                    message["role"] = plain(role)
        values.update(given, add_generation_prompt=add_generation_prompt)
        inputs = [value for name, value in values.items() if name in extra or name in ("messages", "tools")]
        try:
            weight = weigh(inputs, self._bounds.input)
        except BoundsExceededError:
            raise RequestError("The messages are too large for a chat template.", parameter="messages") from None
        budget = RenderBudget(self._bounds, weight, tracks=tracks)
        token = RENDER_BUDGET.set(budget)
        try:
            prompt = self._run(budget, values)
        finally:
            RENDER_BUDGET.reset(token)
        if chat is not None and self._outlines.wants(chat.shape):
            self._outlines.keep(chat.shape, self._outline(chat, values, RenderBudget(self._bounds, weight), prompt))
        return prompt

    def _outline(
        self, chat: _SimpleChat, values: Mapping[str, Any], budget: RenderBudget, prompt: str
    ) -> Outline | None:
        template = self._traced = self._traced or tracing_sandbox().template(self._code)
        outline = trace(template, values, chat.roles, chat.contents, budget)
        return outline if outline is not None and outline.text(chat.contents) == prompt else None

    def _run(self, budget: RenderBudget, values: dict[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(values):
                length += len(piece)
                budget.check(length)
                pieces.append(piece)
        except _RaisedError as error:
            raise RequestError(
                _shorten(f"The model's chat template rejects the messages: {error}"), parameter="messages"
            ) from None
        except BoundsExceededError as error:
            raise self._error(f"exceeds its limits: {error}{_line()}") from None
        except SecurityError as error:
            raise self._error(f"tries to leave the sandbox: {error}{_line()}") from None
        except RecursionError:
            raise self._error("recurses too deep") from None
        except MemoryError:
            raise self._error("ran out of memory") from None
        except jinja2.TemplateError as error:
            raise self._error(f"fails: {error.message}{_line()}") from None
        except Exception as error:  # any operation on values of unexpected types
            raise self._error(f"fails: {type(error).__name__}: {error}{_line()}") from None
        return join("", pieces) if budget.tracks else "".join(pieces)

    def _error(self, reason: str) -> TemplateError:
        return TemplateError(_shorten(f"The chat template {reason}."), path=self._path)

    def _strftime_now(self, format: str) -> str:
        if len(format) > 256 or not _TIME_FORMAT.fullmatch(format):
            raise ValueError("strftime_now takes a short format without widths")
        return self._now().strftime(format)


def _simple_chat(
    messages: Sequence[Mapping[str, Any]], tools: object, add_generation_prompt: object, extra: Mapping[str, Any]
) -> _SimpleChat | None:
    if tools is not None or len(messages) > MAX_MESSAGES:
        return None
    roles: list[str] = []
    contents: list[str] = []
    for message in messages:
        if len(message) != 2:
            return None
        role: object = message.get("role")
        content: object = message.get("content")
        if type(role) is not str or type(content) is not str:
            return None
        roles.append(role)
        contents.append(content)
    if any(value is not None and type(value) not in _SIMPLE for value in extra.values()):
        return None
    if sum(map(len, contents)) > MAX_CHARACTERS or sum(map(len, roles)) > MAX_ROLE_CHARACTERS:
        return None
    shape = (tuple(roles), bool(add_generation_prompt), *sorted([(name, repr(value)) for name, value in extra.items()]))
    return _SimpleChat(shape, tuple(roles), tuple(contents))


def _raise_exception(message: object) -> NoReturn:
    raise _RaisedError(RENDER_BUDGET.get().text(message))


def _with_reasoning(chat: list[Any]) -> list[Any]:
    """Give each message its reasoning under every name that a template may use."""
    for message in cast("list[dict[Any, Any]]", chat):
        if not isinstance(message, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - comes from outside
            raise RequestError("Every message must be an object.", parameter="messages")
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        if reasoning is not None:
            message.setdefault("thinking", reasoning)
            message["reasoning_content"] = reasoning
    # A new list, because messages may have grown and a WeighedList caches its weight.
    return list(chat)


def _plain(value: object, parameter: str, texts: list[str]) -> Any:
    """Copy a value that has JSON types only, because the sandbox does not know the methods of other types. Append its
    texts to `texts`."""
    try:
        return _copied(value, texts)
    except TypeError as error:
        raise RequestError(f"'{parameter}' contains {error}, which is not JSON.", parameter=parameter) from None
    except RecursionError:
        raise RequestError(f"'{parameter}' is nested too deep.", parameter=parameter) from None


def _copied(value: object, texts: list[str]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = value if type(value) is str else str.__str__(value)
        texts.append(text)
        return text
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        return {_copied(key, texts): _copied(item, texts) for key, item in pairs.items()}
    if isinstance(value, list | tuple):
        copied = WeighedList(_copied(item, texts) for item in cast("Iterable[object]", value))
        copied.weight = ITEM + sum(ITEM + weigh(item, sys.maxsize) for item in copied)
        return copied
    raise TypeError(f"a {type(value).__name__}")


def _line() -> str:
    """Return the line of the template that raised the error being handled."""
    trace: TracebackType | None = sys.exc_info()[2]
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILENAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def _shorten(reason: str) -> str:
    return reason if len(reason) <= _REASON_LENGTH else f"{reason[:_REASON_LENGTH]}..."
