"""Describes a model and reads it: its spec, weights, tokenizer and chat template. Does not run it."""
