"""Configuration of pinned prompts: texts whose KV an engine computes at the start and never evicts.

The configuration, the admin API and the flow share `PinConfig`. Tokenises and computes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from headrace.config.value_types import Finding, Section, Text

MOST_PINS: Final = 256  # of a model, and of the admin API
SOURCES: Final = ("system", "text", "system_file", "text_file")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PinConfig(Section, frozen=True):
    """One pinned prompt: a text, and the tenant whose requests find it, or all tenants."""

    name: Text  # shown in the admin API and in logs
    system: Text | None = None  # a system message, written by the model's chat template
    text: Text | None = None  # the beginning of a completion's prompt
    system_file: Text | None = None  # UTF-8 file with the system message
    text_file: Text | None = None  # UTF-8 file with the beginning of a prompt
    tenant: Text | None = None  # whose requests find it
    public: bool = False  # the requests of all tenants find it

    @property
    def file(self) -> Path | None:
        name = self.system_file or self.text_file
        return None if name is None else Path(name).expanduser()


def check_pins(pins: Sequence[PinConfig], where: str) -> Iterator[Finding]:
    if len(pins) > MOST_PINS:
        yield where, f"expected at most {MOST_PINS} pins, found {len(pins)}"
    names: dict[str, int] = {}
    for place, pin in enumerate(pins):
        here = f"{where}[{place}]"
        first = names.setdefault(pin.name, place)
        if first != place:
            yield f"{here}.name", f'duplicate name "{pin.name}": pins[{first}] has it too'
        yield from ((f"{here}.{key}" if key else here, reason) for key, reason in check_pin(pin))


def check_pin(pin: PinConfig) -> Iterator[Finding]:
    """Yield what is wrong with one pin, by its key."""
    if not _NAME.fullmatch(pin.name):
        yield "name", f'expected up to 64 letters, digits and . _ -, found "{pin.name[:100]}"'
    given = [name for name in SOURCES if getattr(pin, name) is not None]
    if len(given) != 1:
        yield "", f"expected exactly one of {', '.join(SOURCES)}, found {' and '.join(given) or 'none'}"
    if pin.public == (pin.tenant is not None):
        found = "both" if pin.public else "neither"
        yield "", f"expected either public = true (all tenants share it) or a tenant, found {found}"
