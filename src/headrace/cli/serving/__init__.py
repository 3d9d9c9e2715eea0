"""Commands that get models and run them for clients and for other servers."""
