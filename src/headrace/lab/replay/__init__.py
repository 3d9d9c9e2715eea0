"""Replays recorded requests against a server or a model."""
