"""Upstreams: OpenAI-compatible servers that Millrace does not run, served like variants of its own."""
