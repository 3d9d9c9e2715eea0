"""Fits routing and the semantic cache to the user's own traffic."""
