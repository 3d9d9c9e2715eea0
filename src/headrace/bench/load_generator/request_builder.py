"""Requests as they go over the wire: a session's texts, its messages or prompt, its body, its head.

Owns Prompts, which builds them, and Frames, the tokens that a chat template adds. The texts are headrace.bench.
texts's. Knows nothing of when requests are sent.
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
MOST_KEPT_TEXTS: Final = 4096  # shared beginnings whose texts are kept
MOST_AHEAD: Final = 4096  # requests that are built before they are needed
MOST_AHEAD_BYTES: Final = 64 * 1024 * 1024  # 64 MiB of them

Shape = tuple[str, ...]  # the roles of a chat's messages; empty: a prompt
Message = dict[str, str]


class BuiltRequest(msgspec.Struct, frozen=True):
    request: bytes
    text: str  # of the user's latest message
    asked_input: int  # tokens that the server should count; 0: nobody knows
    asked_output: int


class TemplateOverheads(msgspec.Struct):
    """Tokens of a prompt beyond those of its texts, by its shape."""

    known: dict[Shape, int] = {}

    def of(self, shape: Shape) -> int:
        return self.known.get(shape, 0)


def shape_of(session: Session, *, chat: bool) -> Shape:
    """Of a session's first request."""
    if not chat:
        return ()
    kind = session.prefix.kind if session.prefix is not None else "documents"
    return {"system": ("system", "user"), "few-shot": ("user", "assistant") * EXAMPLES + ("user",)}.get(kind, ("user",))


def sample_of(shape: Shape) -> dict[str, Any]:
    """The messages or the prompt of a shape, each text the cheapest that there is."""
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
        """`body`: fields of every request; `keys`: tenants' API keys. Without a writer only literal prompts go."""
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
        self, session: Session, turn: int, history: Sequence[tuple[str, str]], *, to_its_end: bool = False
    ) -> BuiltRequest:
        """`history`: what the user said in earlier turns, and the answers; `to_its_end`: the model may end its own."""
        asked = session.turns[turn]
        shape = shape_of(session, chat=self.chat)
        frame = self.frames.of(shape)
        before, counted = self._before(session)
        if session.text is not None:
            text, total = session.text, 0
        elif session.blocks:
            text, tokens = self._blocks(session, asked.tokens - frame)
            total = tokens + frame
        else:
            own, tokens = self._write(f"{session.name} {turn}", asked.tokens - (0 if turn else frame))
            text = own
            total = counted + tokens + frame if not turn else 0
        body = self._body | self._said(session, before, history, text)
        if asked.answer:
            body["max_tokens"] = asked.answer
            if self._ignore_eos and not to_its_end:
                body["ignore_eos"] = True
        request = request_of(self._head(session), msgspec.json.encode(body))
        return BuiltRequest(request, text, total, asked.answer)

    def _said(self, session: Session, before: str, history: Sequence[tuple[str, str]], text: str) -> dict[str, object]:
        if not self.chat:
            parts = [before] if before else []
            for said, answer in history:
                parts += [said, answer]
            return {"prompt": " ".join([*parts, text])}
        messages: list[Message] = []
        kind = session.prefix.kind if session.prefix is not None else None
        if kind == "system":
            messages.append({"role": "system", "content": before})
        elif kind == "few-shot" and session.prefix is not None:
            messages += self._examples(session.prefix)
        asks = [*(said for said, _ in history), text]
        if kind == "documents":
            asks[0] = f"{before} {asks[0]}"
        for place, ask in enumerate(asks):
            messages.append({"role": "user", "content": ask})
            if place < len(history):
                messages.append({"role": "assistant", "content": history[place][1]})
        return {"messages": messages}

    def _before(self, session: Session) -> tuple[str, int]:
        """The shared beginning, and its tokens."""
        prefix = session.prefix
        if prefix is None:
            return "", 0
        if prefix.kind == "few-shot":
            parts = [each["content"] for each in self._examples(prefix)]
            return " ".join(parts), sum(_even(prefix.tokens, 2 * EXAMPLES))
        return self._shared(f"prefix {prefix.name}", prefix.tokens), prefix.tokens

    def _examples(self, prefix: PromptPrefix) -> list[Message]:
        lengths = _even(prefix.tokens, 2 * EXAMPLES)
        return [
            {
                "role": "assistant" if place % 2 else "user",
                "content": self._shared(f"prefix {prefix.name} {place}", length),
            }
            for place, length in enumerate(lengths)
        ]

    def _blocks(self, session: Session, tokens: int) -> tuple[str, int]:
        """Blocks in order, the last as long as there is room; what they leave is the session's own."""
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
    """Sessions with their first requests, some of them built before they are due."""

    def __init__(self, sessions: Iterator[Session], prompts: RequestBuilder) -> None:
        self._sessions = sessions
        self._prompts = prompts
        self._built: deque[tuple[Session, BuiltRequest]] = deque()
        self._bytes = 0

    def fill(self, count: int) -> None:
        """Builds so many, or as many as there is room for."""
        while len(self._built) < min(count, MOST_AHEAD) and self._bytes < MOST_AHEAD_BYTES:
            session = next(self._sessions, None)
            if session is None:
                return
            self._built.append(self._build(session))
            self._bytes += len(self._built[-1][1].request)

    def next(self) -> tuple[Session, BuiltRequest] | None:
        """None at the end."""
        if self._built:
            session, prompt = self._built.popleft()
            self._bytes -= len(prompt.request)
            return session, prompt
        session = next(self._sessions, None)
        return None if session is None else self._build(session)

    def _build(self, session: Session) -> tuple[Session, BuiltRequest]:
        return session, self._prompts.build(session, 0, ())


def _even(total: int, parts: int) -> list[int]:
    """As even as whole numbers are; none below 1."""
    return [max(1, (place + 1) * total // parts - place * total // parts) for place in range(parts)]
