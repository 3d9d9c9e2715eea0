"""PROVE it: what a machine can do at most, and what servers really do."""
