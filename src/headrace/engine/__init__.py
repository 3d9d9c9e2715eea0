"""Runs a model: executors, and the scheduling, memory and speculation that feed them."""
