"""Compares a candidate's answers with a baseline's: pure functions, and the statistics behind a verdict."""
