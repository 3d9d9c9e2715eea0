"""Millrace serves large language models with low latency."""

from __future__ import annotations

__version__ = "0.1.0"
