"""Several processes that serve one port: the main process owns all state, and front processes reach it by a socket."""
