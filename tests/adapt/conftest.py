"""Models for the tests of adaptation."""

from __future__ import annotations

from tests.models.conftest import tiny

__all__ = ["tiny"]
