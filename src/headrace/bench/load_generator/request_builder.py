"""Builds requests: a session's texts, its messages or prompt, the body and the HTTP head.

Does not decide when they are sent.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.bench.client.http_client import Target, head_of, request_of
from headrace.bench.load_generator.text_generator import FIRST, TextGenerator
from headrace.bench.load_generator.workloads import EXAMPLES, PromptPrefix, Session

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MOST_KEPT_TEXTS: Final = 4096  # shared prefixes whose texts are cached
MOST_AHEAD: Final = 4096  # requests built before they are due
MOST_AHEAD_BYTES: Final = 64 * 1024 * 1024  # 64 MiB

Shape = tuple[str, ...]  # the roles of a chat's messages; empty for a completion
Message = dict[str, str]


class BuiltRequest(msgspec.Struct, frozen=True):
    request: bytes
    text: str  # the user's latest message
    asked_input: int  # prompt tokens that the server should count; 0: unknown
    asked_output: int


class TemplateOverheads(msgspec.Struct):
    """Tokens that the chat template adds to a prompt, by its shape."""

    known: dict[Shape, int] = {}

    def of(self, shape: Shape) -> int:
        return self.known.get(shape, 0)


def shape_of(session: Session, *, chat: bool) -> Shape:
    """Return the shape of a session's first request."""
    if not chat:
        return ()
    kind = session.prefix.kind if session.prefix is not None else "documents"
    return {"system": ("system", "user"), "few-shot": ("user", "assistant") * EXAMPLES + ("user",)}.get(kind, ("user",))


def sample_of(shape: Shape) -> dict[str, Any]:
    """Return the smallest prompt of a shape."""
    return {"messages": [{"role": role, "content": FIRST} for role in shape]} if shape else {"prompt": FIRST}


class RequestBuilder:
    def __init__(
        self,
        target: Target,
        *,
        chat: bool,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        keys: Mapping[str, str] | None = None,
        writer: TextGenerator | None = None,
        frames: TemplateOverheads | None = None,
        ignore_eos: bool = True,
    ) -> None:
        """`body`: fields of every request; `keys`: tenants' API keys. Without a writer, prompts are literal."""
        self.chat = chat
        self.frames = frames or TemplateOverheads()
        self.writer = writer
        self._target = target
        self._body = dict(body)
        self._headers = dict(headers)
        self._keys = dict(keys or {})
        self._ignore_eos = ignore_eos
        self._heads: OrderedDict[tuple[str, str, int, float | None], bytes] = OrderedDict()
        self._texts: OrderedDict[tuple[str, int], str] = OrderedDict()

    def build(
        self, session: Session, turn: int, history: Sequence[tuple[str, str]], *, until_eos: bool = False
    ) -> BuiltRequest:
        """Build one turn. `history`: earlier questions and answers; `until_eos`: let the model end its answer."""
        length = session.turns[turn]
        shape = shape_of(session, chat=self.chat)
        frame = self.frames.of(shape)
        prefix, prefix_tokens = self._prefix(session)
        if session.text is not None:
            text, total = session.text, 0
        elif session.blocks:
            text, tokens = self._blocks(session, length.tokens - frame)
            total = tokens + frame
        else:
            own, tokens = self._write(f"{session.name} {turn}", length.tokens - (0 if turn else frame))
            text = own
            total = prefix_tokens + tokens + frame if not turn else 0
        body = self._body | self._prompt_fields(session, prefix, history, text)
        if length.answer:
            body["max_tokens"] = length.answer
            if self._ignore_eos and not until_eos:
                body["ignore_eos"] = True
        request = request_of(self._head(session), msgspec.json.encode(body))
        return BuiltRequest(request, text, total, length.answer)

    def _prompt_fields(
        self, session: Session, prefix: str, history: Sequence[tuple[str, str]], text: str
    ) -> dict[str, object]:
        if not self.chat:
            parts = [prefix] if prefix else []
            for question, answer in history:
                parts += [question, answer]
            return {"prompt": " ".join([*parts, text])}
        messages: list[Message] = []
        kind = session.prefix.kind if session.prefix is not None else None
        if kind == "system":
            messages.append({"role": "system", "content": prefix})
        elif kind == "few-shot" and session.prefix is not None:
            messages += self._examples(session.prefix)
        questions = [*(question for question, _ in history), text]
        if kind == "documents":
            questions[0] = f"{prefix} {questions[0]}"
        for place, question in enumerate(questions):
            messages.append({"role": "user", "content": question})
            if place < len(history):
                messages.append({"role": "assistant", "content": history[place][1]})
        return {"messages": messages}

    def _prefix(self, session: Session) -> tuple[str, int]:
        """Return the shared prefix and its tokens."""
        prefix = session.prefix
        if prefix is None:
            return "", 0
        if prefix.kind == "few-shot":
            parts = [each["content"] for each in self._examples(prefix)]
            return " ".join(parts), sum(_split_evenly(prefix.tokens, 2 * EXAMPLES))
        return self._shared(f"prefix {prefix.name}", prefix.tokens), prefix.tokens

    def _examples(self, prefix: PromptPrefix) -> list[Message]:
        lengths = _split_evenly(prefix.tokens, 2 * EXAMPLES)
        return [
            {
                "role": "assistant" if place % 2 else "user",
                "content": self._shared(f"prefix {prefix.name} {place}", length),
            }
            for place, length in enumerate(lengths)
        ]

    def _blocks(self, session: Session, tokens: int) -> tuple[str, int]:
        """Concatenate the session's blocks, cut to `tokens`; fill the rest with unique text."""
        parts: list[str] = []
        total = 0
        for name in session.blocks:
            length = min(session.block_tokens, tokens - total)
            if length > 0:
                parts.append(self._shared(f"block {name}", length))
                total += length
        if total < tokens:
            own, more = self._write(session.name, tokens - total)
            parts.append(own)
            total += more
        return " ".join(parts), total

    def _shared(self, name: str, tokens: int) -> str:
        key = (name, tokens)
        if (text := self._texts.get(key)) is not None:
            self._texts.move_to_end(key)
            return text
        text, _ = self._write(name, tokens)
        self._texts[key] = text
        if len(self._texts) > MOST_KEPT_TEXTS:
            self._texts.popitem(last=False)
        return text

    def _write(self, name: str, tokens: int) -> tuple[str, int]:
        assert self.writer is not None
        return self.writer.text(name, tokens)

    def _head(self, session: Session) -> bytes:
        key = (session.tenant, session.surface, session.priority, session.deadline)
        if (head := self._heads.get(key)) is None:
            headers = dict(self._headers)
            if secret := self._keys.get(session.tenant):
                headers["authorization"] = f"Bearer {secret}"
            if session.surface:
                headers["x-headrace-surface"] = session.surface
            if session.priority:
                headers["x-headrace-priority"] = str(session.priority)
            if session.deadline is not None:
                headers["x-headrace-deadline-ms"] = str(max(1, round(session.deadline * 1000)))
            head = head_of(self._target, "POST", CHAT if self.chat else COMPLETIONS, headers)
            self._heads[key] = head
            if len(self._heads) > MOST_KEPT_TEXTS:
                self._heads.popitem(last=False)
        return head


class PrebuiltRequests:
    """A stream of sessions with their first requests, some of them built before they are due."""

    def __init__(self, sessions: Iterator[Session], prompts: RequestBuilder) -> None:
        self._sessions = sessions
        self._prompts = prompts
        self._built: deque[tuple[Session, BuiltRequest]] = deque()
        self._bytes = 0

    def fill(self, count: int) -> None:
        """Build up to `count` requests in advance, within the memory limit."""
        while len(self._built) < min(count, MOST_AHEAD) and self._bytes < MOST_AHEAD_BYTES:
            session = next(self._sessions, None)
            if session is None:
                return
            self._built.append(self._build(session))
            self._bytes += len(self._built[-1][1].request)

    def next(self) -> tuple[Session, BuiltRequest] | None:
        """Return the next session, or None at the end."""
        if self._built:
            session, prompt = self._built.popleft()
            self._bytes -= len(prompt.request)
            return session, prompt
        session = next(self._sessions, None)
        return None if session is None else self._build(session)

    def _build(self, session: Session) -> tuple[Session, BuiltRequest]:
        return session, self._prompts.build(session, 0, ())


def _split_evenly(total: int, parts: int) -> list[int]:
    """Split `total` into parts that differ by at most 1; none is below 1."""
    return [max(1, (place + 1) * total // parts - place * total // parts) for place in range(parts)]
