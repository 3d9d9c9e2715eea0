"""Models for the tests of compression."""

from __future__ import annotations

from tests.models.conftest import tiny

__all__ = ["tiny"]
