"""Limits before the fact: a request is let in only where every limit that it comes under has room for it."""
