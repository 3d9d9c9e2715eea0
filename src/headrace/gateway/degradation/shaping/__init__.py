"""SHAPE a request before it is tokens: conversations that fit, sources without repetition, the fast profile.

Plain functions on messages and on what is asked; a token counter is passed in. Everything that is done is told
(`told.Shaped`). Knows no model, no network and no pressure: when less is to be asked for is the ladder's.
"""
