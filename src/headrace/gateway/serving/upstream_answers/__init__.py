"""Answers from upstreams: requests written, streams read, relayed, retried and counted."""
