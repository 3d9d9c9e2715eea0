"""Gets answers to cases: from a server by its URL, or from a local model through a temporary server."""
