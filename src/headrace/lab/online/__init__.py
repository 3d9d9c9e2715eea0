"""Proof on live traffic: shadows, canaries, double-checks and drift."""
