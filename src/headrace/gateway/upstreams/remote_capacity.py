"""What another Headrace server says in `GET /v1/capacity`, for the model that an upstream uses there.

Reads and checks the answer; what cannot be read is unknown. Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

PATH: Final = "/v1/capacity"
MOST_BYTES: Final = 1024 * 1024
_LONGEST_MS: Final = 1e9  # beyond any wait that means something

_Number = Annotated[float, Meta(ge=0, le=1e12)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]


class RemoteCapacity(msgspec.Struct, frozen=True):
    """None or absent: the server does not say."""

    status: str  # ready, overloaded or draining
    at: float  # when it was asked
    ttft_s: Mapping[str, float] = {}  # predicted for a new request, by surface
    prompt_tokens_per_s: float | None = None
    free_output_tokens_per_s: float | None = None
    free_kv_tokens: int | None = None

    @property
    def sheds(self) -> bool:
        """True if the server asks for no new requests."""
        return self.status in ("overloaded", "draining")

    def gauges(self) -> dict[str, Any]:
        return {
            "sheds": self.sheds,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "free_output_tokens_per_s": self.free_output_tokens_per_s,
            "free_kv_tokens": self.free_kv_tokens,
            **{f"ttft_s_{surface}": seconds for surface, seconds in self.ttft_s.items()},
        }


class _Model(msgspec.Struct, frozen=True):
    model: str
    available: bool = True
    ttft_ms: dict[str, Annotated[float, Meta(ge=0, le=_LONGEST_MS)]] = {}
    prompt_tokens_per_s: _Number | None = None
    free_output_tokens_per_s: _Number | None = None
    free_kv_tokens: _Count | None = None


class _Answer(msgspec.Struct, frozen=True):
    status: str
    data: list[_Model]


_DECODER: Final = msgspec.json.Decoder(_Answer)


def parse_capacity(body: bytes, model: str, surfaces: frozenset[str], at: float) -> RemoteCapacity | None:
    """Return what the answer says of `model`, and of the server alone if it does not name the model; None if it is no
    such answer. Surfaces that this server does not know are left out."""
    try:
        answer = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    found = next((each for each in answer.data if each.model == model), None)
    if found is None:
        return RemoteCapacity(answer.status, at)
    return RemoteCapacity(
        answer.status if found.available else "overloaded",
        at,
        {surface: ms / 1e3 for surface, ms in found.ttft_ms.items() if surface in surfaces},
        found.prompt_tokens_per_s,
        found.free_output_tokens_per_s,
        found.free_kv_tokens,
    )
