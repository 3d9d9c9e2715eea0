"""Outlines of rendered chats: the text that a template writes around the contents of messages, by the chat's shape.

Most templates put contents into their output and rarely look at them. A rendering with opaque contents shows where each
one goes, and every question that the template asks about it (`'</think>' in content`). A later chat with the same roles
and the same answers has the same outline, so its prompt is joined from parts without running the template.

An operation on a content that this module does not know ends the tracing, and so does a result that differs from the
sandbox's own rendering. Does not bound a rendering: see TemplateSandbox.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
from jinja2.runtime import Context

from headrace.models.text.template_bounds import RENDER_BUDGET, RenderBudget
from headrace.models.text.template_sandbox import TemplateSandbox

MAX_MESSAGES: Final = 256  # of an outline
MAX_CHARACTERS: Final = 1024 * 1024  # of the contents; a longer chat is rendered in the sandbox, which bounds it
MAX_ROLE_CHARACTERS: Final = 4096
_MAX_OUTLINES: Final = 512  # of one template
_MAX_PER_SHAPE: Final = 8  # outlines with other answers
_MAX_WRITTEN: Final = 32 * 1024  # characters that an outline writes itself
_MAX_REPEATS: Final = 4  # times that one content may be written
_MAX_QUESTIONS: Final = 1024

Shape = tuple[object, ...]


class Place(NamedTuple):
    """Where a content is written, and whether without white space around it."""

    message: int
    is_trimmed: bool

    def of(self, contents: Sequence[str]) -> str:
        content = contents[self.message]
        return content.strip() if self.is_trimmed else content


class Question(NamedTuple):
    """What the template asked about a content, and the answer."""

    place: Place
    kind: str
    argument: str
    answer: bool


_ANSWERS: Final[dict[str, Callable[[str, str], bool]]] = {
    "is true": lambda content, _: bool(content),
    "contains": lambda content, part: part in content,
    "equals": lambda content, other: content == other,
    "starts": lambda content, part: content.startswith(part),
    "ends": lambda content, part: content.endswith(part),
}


class Outline(NamedTuple):
    parts: tuple[str | Place, ...]
    questions: tuple[Question, ...]
    dates: tuple[tuple[str, str], ...]  # formats of strftime_now, and what they gave

    def fits(self, contents: Sequence[str], now: Callable[[str], str]) -> bool:
        for place, kind, argument, answer in self.questions:
            if _ANSWERS[kind](place.of(contents), argument) is not answer:
                return False
        return all(now(format) == text for format, text in self.dates)

    def text(self, contents: Sequence[str]) -> str:
        return "".join([part if isinstance(part, str) else part.of(contents) for part in self.parts])


class Outlines:
    """The outlines of one template, by shape. Safe to use from several threads at once."""

    def __init__(self) -> None:
        self._by_shape: dict[Shape, tuple[Outline, ...]] = {}
        self._lock = threading.Lock()

    def find(self, shape: Shape, contents: Sequence[str], now: Callable[[str], str]) -> str | None:
        """Return the prompt of a chat if an outline fits it."""
        for outline in self._by_shape.get(shape, ()):
            if outline.fits(contents, now):
                return outline.text(contents)
        return None

    def wants(self, shape: Shape) -> bool:
        """True if another outline of this shape may be kept: no content of it was looked at in an unknown way."""
        return len(self._by_shape.get(shape, ())) < _MAX_PER_SHAPE

    def keep(self, shape: Shape, outline: Outline | None) -> None:
        """Keep an outline. None: chats of this shape have none."""
        with self._lock:
            known = self._by_shape.pop(shape, ())
            while len(self._by_shape) >= _MAX_OUTLINES:
                del self._by_shape[next(iter(self._by_shape))]
            self._by_shape[shape] = (_NEVER,) * _MAX_PER_SHAPE if outline is None else (*known, outline)


# Fits no chat: an empty text never contains anything.
_NEVER: Final = Outline((), (Question(Place(0, False), "never", "", True),), ())
_ANSWERS["never"] = lambda _content, _argument: False


def trace(
    template: jinja2.Template,
    values: Mapping[str, Any],
    roles: Sequence[str],
    contents: Sequence[str],
    budget: RenderBudget,
) -> Outline | None:
    """Return the outline of a rendering, or None if the template looks at contents in a way that has none.

    `template` is of `tracing_sandbox()`; `values` are those of the sandbox's rendering.
    """
    tracing = _Tracing(contents)
    strftime_now: Callable[[str], str] = values["strftime_now"]

    def recorded(format: str) -> str:
        text = strftime_now(format)
        tracing.dates.append((format, text))
        return text

    messages = [
        {"role": role, "content": _Content(tracing, (Place(index, False),))} for index, role in enumerate(roles)
    ]
    token = RENDER_BUDGET.set(budget)
    try:
        pieces = list(template.generate({**values, "messages": messages, "strftime_now": recorded}))
    except Exception:  # the sandbox has rendered these messages, so this is an operation that contents lack
        return None
    finally:
        RENDER_BUDGET.reset(token)
    if tracing.has_failed or len(tracing.questions) > _MAX_QUESTIONS:
        return None
    parts = _merged(pieces)
    written = sum(len(part) for part in parts if isinstance(part, str))
    places = [part.message for part in parts if isinstance(part, Place)]
    if written > _MAX_WRITTEN or any(places.count(index) > _MAX_REPEATS for index in range(len(contents))):
        return None
    return Outline(parts, tuple(tracing.questions), tuple(dict.fromkeys(tracing.dates)))


def _merged(pieces: Iterable[str]) -> tuple[str | Place, ...]:
    found: list[str | Place] = []
    for piece in pieces:
        for part in piece.content.parts if isinstance(piece, _Written) else (piece,):
            if isinstance(part, str) and found and isinstance(found[-1], str):
                found[-1] += part
            elif part != "":
                found.append(part)
    return tuple(found)


class _UntraceableError(Exception):
    """The template did something with a content of which no outline is known."""


class _Tracing:
    """One rendering."""

    def __init__(self, contents: Sequence[str]) -> None:
        self.contents = contents
        self.questions: dict[Question, None] = {}
        self.dates: list[tuple[str, str]] = []
        self.has_failed = False

    def fail(self) -> NoReturn:
        self.has_failed = True  # also where jinja catches the error
        raise _UntraceableError

    def ask(self, content: _Content, kind: str, argument: object = "") -> bool:
        place = content.only_place()
        if type(argument) is not str:
            self.fail()
        answer = _ANSWERS[kind](place.of(self.contents), argument)
        self.questions[Question(place, kind, argument, answer)] = None
        return answer


def _unknown(self: _Content, *_: Any, **__: Any) -> Any:
    self.tracing.fail()


class _Content:
    """A text that has contents of messages in it. Not a str: all that is not defined here fails."""

    __slots__ = ("parts", "tracing")

    def __init__(self, tracing: _Tracing, parts: tuple[str | Place, ...]) -> None:
        self.tracing = tracing
        self.parts = parts

    def only_place(self) -> Place:
        place = self.parts[0] if len(self.parts) == 1 else None
        if not isinstance(place, Place):
            self.tracing.fail()
        return place

    def trimmed(self) -> _Content:
        return _Content(self.tracing, (Place(self.only_place().message, True),))

    def strip(self, chars: None = None) -> _Content:
        if chars is not None:
            self.tracing.fail()
        return self.trimmed()

    def startswith(self, part: object) -> bool:
        return self.tracing.ask(self, "starts", part)

    def endswith(self, part: object) -> bool:
        return self.tracing.ask(self, "ends", part)

    def __bool__(self) -> bool:
        return self.tracing.ask(self, "is true")

    def __contains__(self, part: object) -> bool:
        return self.tracing.ask(self, "contains", part)

    def __eq__(self, other: object) -> bool:
        return False if other is None else self.tracing.ask(self, "equals", other)

    def __add__(self, other: object) -> _Content:
        return _Content(self.tracing, (*self.parts, *self._parts_of(other)))

    def __radd__(self, other: object) -> _Content:
        return _Content(self.tracing, (*self._parts_of(other), *self.parts))

    def _parts_of(self, other: object) -> tuple[str | Place, ...]:
        if isinstance(other, _Content):
            return other.parts
        if not isinstance(other, str):
            self.tracing.fail()
        return (other,)

    __str__ = __repr__ = __format__ = __hash__ = __len__ = __iter__ = __getitem__ = _unknown  # pyright: ignore
    __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _unknown


class _Written(str):
    """A piece of output with contents in it."""

    __slots__ = ("content",)
    content: _Content

    def __str__(self) -> str:
        return self


_KNOWN_TESTS: Final = {"string": True, "defined": True, "undefined": False, "none": False, "mapping": False}


class _TracingSandbox(TemplateSandbox):
    """Runs templates that the sandbox has compiled, with contents that are opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.finalize = jinja2.pass_context(_finalize)
        self.filters = {name: _filter(name, filter) for name, filter in self.filters.items()}
        self.tests = {name: _test(name, test) for name, test in self.tests.items()}

    @staticmethod
    def concat(pieces: Iterable[str]) -> Any:
        known = list(pieces)
        written = next((piece for piece in known if isinstance(piece, _Written)), None)
        return "".join(known) if written is None else _Content(written.content.tracing, _merged(known))

    def concat_texts(self, *items: Any) -> Any:
        content = next((item for item in items if isinstance(item, _Content)), None)
        if content is None:
            return super().concat_texts(*items)
        budget = RENDER_BUDGET.get()
        parts = (item.parts if isinstance(item, _Content) else (budget.text(item),) for item in items)
        return _Content(content.tracing, tuple(part for each in parts for part in each))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for operand in (left, right):
            if isinstance(operand, _Content):
                return left + right if operator == "+" else operand.tracing.fail()
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if not isinstance(obj, _Content):
            return super().getattr(obj, attribute)
        return getattr(obj, attribute) if attribute in ("strip", "startswith", "endswith") else obj.tracing.fail()

    def getitem(self, obj: Any, argument: Any) -> Any:
        for each in (obj, argument):
            if isinstance(each, _Content):
                each.tracing.fail()
        return super().getitem(obj, argument)


@cache
def tracing_sandbox() -> TemplateSandbox:
    return _TracingSandbox()


def _finalize(context: Context, value: Any) -> str:
    if not isinstance(value, _Content):
        return RENDER_BUDGET.get().text(value)
    piece = _Written()
    piece.content = value
    return piece


def _filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_context
    def traced(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        content = _first_content(value, args, kwargs)
        if content is None:
            return filter(context, value, *args, **kwargs)
        if content is value and name == "trim" and not (args or kwargs):
            return content.trimmed()
        if content is value and name == "string":
            return content
        return content.tracing.fail()

    return traced


def _test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        content = _first_content(None, args, kwargs)
        if content is None:
            return test(*args, **kwargs)
        return _KNOWN_TESTS[name] if name in _KNOWN_TESTS and len(args) == 1 else content.tracing.fail()

    if (passes := getattr(test, "jinja_pass_arg", None)) is not None:
        traced.jinja_pass_arg = passes  # pyright: ignore[reportFunctionMemberAccess] - jinja's mark
    return traced


def _first_content(value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Content | None:
    return next((each for each in (value, *args, *kwargs.values()) if isinstance(each, _Content)), None)
