"""PinnedPrompts: turns the pins of the configuration and of the admin API into prefixes that the engines keep.

One task compares what is wanted with what the engines keep, and changes the difference; it tries again what failed. An
engine that is restarted computes its pins by itself (`EngineClient.pin`). Does not store pins.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, runtime_checkable

import msgspec

from headrace.config import ModelConfig
from headrace.config.pin_section import PinConfig
from headrace.errors import HeadraceError, RequestError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.llm.prompting import prefix_tokens

log = logging.getLogger(__name__)

_RETRY_S: Final = 30.0  # until a pin that failed is tried again
_MOST_FILE_BYTES: Final = 16 * 1024 * 1024

PinStatus = Literal["computing", "pinned", "failed"]


@runtime_checkable
class PrefixKeeper(Protocol):
    """An engine that can keep prefixes."""

    async def pin(
        self, tokens: Sequence[int], salt: str = "", *, public: bool = False, keep: bool = True, owner: str = ""
    ) -> None: ...


class PinnedPrompt(msgspec.Struct, frozen=True):
    id: str
    model: str  # a model, whose variants are included, or a variant
    config: PinConfig
    source: Literal["config", "admin"]
    created: int | None = None  # seconds since 1970


class PinState(msgspec.Struct):
    """A pin in one variant."""

    status: PinStatus = "computing"
    tokens: int = 0
    reason: str = ""
    key: tuple[str, tuple[int, ...]] | None = None  # salt and tokens that the engine keeps


class PinnedPrompts:
    """All of it belongs to one event loop."""

    def __init__(self, fleet: Fleet, models: Mapping[str, ModelConfig], *, start_s: float = 60.0) -> None:
        """`start_s`: seconds that the start of the server waits for pins to be computed."""
        self._fleet = fleet
        self._start_s = start_s
        self._starting: asyncio.Future[None] | None = None
        self._declared = {
            pin.id: pin
            for name, model in models.items()
            for pin in (PinnedPrompt(_declared_id(name, each.name), name, each, "config") for each in model.pins)
        }
        self._wanted = dict(self._declared)
        self._states: dict[str, dict[str, PinState]] = {}  # by pin and variant
        self._changed = asyncio.Event()

    def want(self, pins: Iterable[PinnedPrompt]) -> None:
        """Replace the pins of the admin API; those of the configuration stay."""
        self._wanted = self._declared | {pin.id: pin for pin in pins}
        self._changed.set()

    def listed(self) -> list[dict[str, Any]]:
        """Return all pins with their state in each variant, as JSON. Texts are left out."""
        return [self.shown(pin) for pin in self._wanted.values()]

    def find(self, id: str) -> PinnedPrompt | None:
        return self._wanted.get(id)

    def shown(self, pin: PinnedPrompt) -> dict[str, Any]:
        states = self._states.get(pin.id, {})
        return {
            "object": "pin",
            "id": pin.id,
            "name": pin.config.name,
            "model": pin.model,
            "tenant": pin.config.tenant,
            "public": pin.config.public,
            "source": pin.source,
            "created_at": pin.created,
            "variants": [
                {"variant": name, **_state_json(states.get(name, PinState()))} for name in self._variants(pin)
            ],
        }

    async def start(self) -> None:
        """Pin what is known at the start, and return when it is computed or after `start_s`."""
        self._changed.clear()
        self._starting = asyncio.ensure_future(self._reconcile())
        done, _ = await asyncio.wait({self._starting}, timeout=self._start_s)
        if not done:
            log.warning("pinned prompts are still being computed after %g s; the server starts", self._start_s)

    async def run(self) -> None:
        """Follow changes until cancelled."""
        if self._starting is not None:
            await self._starting
        while True:
            failed = any(state.status == "failed" for states in self._states.values() for state in states.values())
            try:
                async with asyncio.timeout(_RETRY_S if failed else None):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            await self._reconcile()

    def _variants(self, pin: PinnedPrompt) -> list[str]:
        """Return the variants on our own engines that a pin applies to."""
        served = self._fleet.served
        names = [name for name in served if name == pin.model or name.startswith(f"{pin.model}@")]
        return [name for name in names if served[name].upstream is None]

    async def _reconcile(self) -> None:
        for id in [id for id in self._states if id not in self._wanted]:
            for variant, state in self._states.pop(id).items():
                await self._unpin(variant, state)
        for pin in list(self._wanted.values()):
            states = self._states.setdefault(pin.id, {})
            for variant in self._variants(pin):
                state = states.setdefault(variant, PinState())
                if state.status != "pinned" and pin.id in self._wanted:
                    await self._pin(pin, self._fleet.served[variant], state)

    async def _pin(self, pin: PinnedPrompt, served: ServedVariant, state: PinState) -> None:
        salt = pin.config.tenant or ""
        try:
            tokens = await asyncio.to_thread(_tokens, pin.config, served)
            if not isinstance(served.engine, PrefixKeeper):
                raise RequestError("This engine cannot pin prompts.")
            state.tokens = len(tokens)
            await served.engine.pin(tokens, salt, public=pin.config.public)
        except (HeadraceError, ApiError, OSError, UnicodeDecodeError) as error:
            if state.status != "failed" or state.reason != str(error):
                log.error("the prompt %s is not pinned in %s: %s", pin.id, served.name, error)
            state.status, state.reason = "failed", str(error)
        else:
            state.status, state.reason, state.key = "pinned", "", (salt, tokens)

    async def _unpin(self, variant: str, state: PinState) -> None:
        served = self._fleet.served.get(variant)
        if state.key is None or served is None or not isinstance(served.engine, PrefixKeeper):
            return
        if any(states[variant].key == state.key for states in self._states.values() if variant in states):
            return  # another pin has the same beginning
        salt, tokens = state.key
        try:
            await served.engine.pin(tokens, salt, keep=False)
        except HeadraceError as error:
            log.warning("a prompt is still pinned in %s: %s", variant, error)


def _declared_id(model: str, name: str) -> str:
    """Return the id of a pin of the configuration, the same after every start."""
    digest = hashlib.sha256(f"{model} {name}".encode()).hexdigest()
    return f"pin_{digest[:16]}"


def _state_json(state: PinState) -> dict[str, Any]:
    return {"status": state.status, "tokens": state.tokens, "reason": state.reason or None}


def _tokens(pin: PinConfig, served: ServedVariant) -> tuple[int, ...]:
    """Return the tokens that prompts with the pin's text begin with. HeadraceError if they cannot be pinned."""
    if served.kind != "decoder":
        raise RequestError(f"'{served.name}' {served.purpose}, so it cannot pin prompts.")
    system, text = pin.system, pin.text or ""
    if pin.file is not None:
        if pin.file.stat().st_size > _MOST_FILE_BYTES:
            raise RequestError(f"{pin.file} is longer than {_MOST_FILE_BYTES} bytes.")
        content = pin.file.read_text(encoding="utf-8")
        system, text = (content, "") if pin.system_file is not None else (None, content)

    def as_prompt(prompt: str) -> str:
        marked = served.prompt_text(prompt)
        assert isinstance(marked, str)
        return marked

    tokens = prefix_tokens(served.tokenizer, system=system, text=text, as_prompt=as_prompt)
    if len(tokens) >= served.context:
        raise RequestError(f"The text has {len(tokens)} tokens, and the context of '{served.name}' {served.context}.")
    return tokens
