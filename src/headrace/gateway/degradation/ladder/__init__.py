"""DEGRADE as declared: which steps a surface takes under which pressure, and what each of them does.

    trim → max_tokens → variant → stale → extract → refuse

`pressure` keeps what is known of queues and memory, `levels` decides how far down a request goes, `steps` says what
that means for it and tells it, `extract` answers from the request's own sources without a model. Nothing here
generates, waits or knows a connection.
"""
