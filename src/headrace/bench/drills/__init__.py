"""Playbooks run for practice: a server of its own, a fault, and what happened beside what was promised.

Each drill is one module with a function `run(drill)`. It reaches its server over HTTP alone, so it sees what a client
sees. See docs/how-to/playbooks.md.
"""
