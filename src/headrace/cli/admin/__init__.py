"""The commands that administer a running server."""
