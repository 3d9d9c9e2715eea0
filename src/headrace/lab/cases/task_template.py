"""Fills the templates of task files: {{ field }} with filters, in Jinja's sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import RequestError

MOST_TEXT: Final = 1024 * 1024  # characters of a filled template
_ENVIRONMENT: Final = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
_ENVIRONMENT.globals.clear()  # no range and no lipsum: a template cannot grow without bound


def fill(template: str, values: Mapping[str, Any], where: str) -> str:
    """Fill a template. RequestError for a mistake in it or a field that the document does not have."""
    try:
        text = _ENVIRONMENT.from_string(template).render(values)
    except (TemplateError, TypeError, ValueError) as error:
        raise RequestError(f"{where}: the template '{template[:80]}' cannot be filled: {error}") from None
    if len(text) > MOST_TEXT:
        raise RequestError(f"{where}: the filled template is longer than {MOST_TEXT} characters.")
    return text
