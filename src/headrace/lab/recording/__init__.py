"""Records the requests and answers of tenants that opted in: redacted, bounded, encrypted if a key is given."""
