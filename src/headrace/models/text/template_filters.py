"""Bounds jinja's filters and the methods of strings: checks arguments before the work, and charges the result.

Does not know syntax trees or which attributes a template may read.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import jinja2
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context
from markupsafe import Markup

from headrace.models.text.template_bounds import (
    MAX_BATCH,
    MAX_DIGITS,
    MAX_PRECISION,
    RENDER_BUDGET,
    BoundsExceededError,
    RenderBudget,
)
from headrace.models.text.user_text import inherit

_LEFT_OUT: Final = frozenset({"pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"})
# Filters that visit a whole container.
_THOROUGH: Final = frozenset(
    "dictsort e escape forceescape groupby list max min safe sort string unique urlencode".split()
)
# Filters that write a text; the others return what they get, or a part of it.
_WRITING: Final = frozenset(
    "capitalize center e escape forceescape format indent lower replace safe string title tojson trim truncate upper "
    "urlencode".split()
)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def checked_method(
    budget: RenderBudget, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Check the arguments of a string method and return them, with lazy ones materialised."""
    budget.check(len(text))
    first = args[0] if args else None
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            budget.check_width(first)
        case "expandtabs":
            size = _argument(args, kwargs, 0, "tabsize", 8)
            if isinstance(size, int):
                budget.check(len(text) + text.count("\t") * max(size, 0))
        case "replace" if len(args) > 1:
            budget.check_replace(text, first, args[1], _argument(args, kwargs, 2, "count"))
        case "strip" | "lstrip" | "rstrip" | "rfind" | "rindex" | "rpartition" | "rsplit":
            budget.check_scan(text, kwargs.get("sep", first))
        case "join" if args:
            items = list(budget.materialised(iter(args[0])))
            budget.check(len(text) * len(items))
            return (items, *args[1:])
        case _:
            pass
    return args


def _check_filter(
    budget: RenderBudget, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    match name:
        case "center":
            budget.check_width(_argument(args, kwargs, 0, "width"))
        case "replace":
            old, new = _argument(args, kwargs, 0, "old"), _argument(args, kwargs, 1, "new")
            budget.check_replace(value, budget.text(old), budget.text(new), _argument(args, kwargs, 2, "count"))
        case "indent":
            width = _argument(args, kwargs, 0, "width", 4)
            step = len(width) if isinstance(width, str) else width
            text = budget.text(value)
            if isinstance(step, int):
                budget.check(len(text) + (text.count("\n") + 1) * max(step, 0))
        case "trim":
            budget.check_scan(value, _argument(args, kwargs, 0, "chars"))
        case "format":
            budget.check_percent(budget.text(value), dict(kwargs) or args)
        case "batch":
            if _argument(args, kwargs, 0, "linecount", 0) > MAX_BATCH:
                raise BoundsExceededError("a batch of too many items")
        case "int":
            if isinstance(value, str) and len(value) > MAX_DIGITS:
                raise BoundsExceededError("an integer of too many digits")
        case "round":
            if abs(_argument(args, kwargs, 0, "precision", 0)) > MAX_PRECISION:
                raise BoundsExceededError("a number rounded to too many digits")
        case _:
            pass


def bounded_filters() -> dict[str, Callable[..., Any]]:
    return {name: _bounded(name, filter) for name, filter in FILTERS.items() if name not in _LEFT_OUT}


def _bounded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a jinja filter: tick, check the arguments, charge the result."""
    filter = _OWN_FILTERS.get(name, filter)
    passes: Any = getattr(filter, "jinja_pass_arg", None)
    thorough = name in _THOROUGH

    # pass_context also keeps jinja from evaluating the filter at compile time, where there is no budget.
    @jinja2.pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = RENDER_BUDGET.get()
        budget.tick()
        if isinstance(value, str):
            budget.check(len(value))
        elif thorough:
            value = budget.materialised(value)
        _check_filter(budget, name, value, args, kwargs)
        if passes is None:
            result = filter(value, *args, **kwargs)
        else:
            first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
            result = filter(first[passes.name], value, *args, **kwargs)
        if budget.tracks and name in _WRITING:
            result = inherit(result, value, args, kwargs)
        return budget.charged(result)

    return bounded


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Encode JSON as transformers does, without HTML escapes."""
    budget = RENDER_BUDGET.get()
    budget.materialised(value)
    if isinstance(indent, int | str) and (indent if isinstance(indent, int) else len(indent)) > 16:
        raise BoundsExceededError("JSON with too wide an indent")
    for separator in separators or ():
        if len(separator) > 16:
            raise BoundsExceededError("JSON with too long a separator")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=True
    )
    if indent is None:
        return encoder.encode(value)
    # With an indent, deep nesting can be far larger than the value.
    pieces: list[str] = []
    length = 0
    for piece in encoder.iterencode(value):
        length += len(piece)
        budget.check(length)
        pieces.append(piece)
    return "".join(pieces)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: Any = None) -> str:
    budget = RENDER_BUDGET.get()
    items: list[Any] = list(budget.materialised(iter(value)))
    if attribute is not None:
        items = [make_attrgetter(environment, attribute)(item) for item in items]
    if any(isinstance(item, Markup) for item in (d, *items)):
        d = Markup.escape(budget.text(d)) if not isinstance(d, Markup) else d
        items = [item if isinstance(item, Markup) else Markup.escape(budget.text(item)) for item in items]
    return budget.join(budget.text(d), items)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    budget = RENDER_BUDGET.get()
    read = None if attribute is None else make_attrgetter(environment, attribute)
    for item in value:
        budget.tick()
        start = budget.operate("+", start, read(item) if read else item, operator.add)
    return start


_OWN_FILTERS: Final[dict[str, Callable[..., Any]]] = {"join": _join, "sum": _sum, "tojson": _tojson}
