"""Measures a model, or a precision of it, on a text: perplexity, and the distance from a reference."""
