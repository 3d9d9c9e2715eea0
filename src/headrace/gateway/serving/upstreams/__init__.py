"""Upstreams: OpenAI-compatible servers that Headrace does not run, served like variants of its own."""
