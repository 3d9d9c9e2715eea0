"""Upstreams: OpenAI-compatible servers that somebody else runs. Their connections, slots, health and errors."""
