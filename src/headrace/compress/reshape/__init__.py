"""Gives a model another shape: fewer heads, neurons or experts, or experts instead of dense layers."""
