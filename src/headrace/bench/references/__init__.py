"""Slower ways to serve, run only to show what a technique gains: no KV cache, static batches, contiguous memory, ..."""
