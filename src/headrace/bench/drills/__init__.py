"""Drills: each starts a server, causes a failure and checks what the playbook promises.

Every drill is one module with `run()`, and talks to its server over HTTP only, so it sees what a client sees. Its
promises are functions of the replies, so that tests can check them without a server. See docs/how-to/playbooks.md.
"""
