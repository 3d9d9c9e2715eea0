"""Shapes a request before it becomes tokens: conversations that fit, sources without repetition, the fast profile.

Plain functions on messages; a token counter is passed in. Every change is reported as a ShapingChange. Does not know
models, the network or pressure.
"""
