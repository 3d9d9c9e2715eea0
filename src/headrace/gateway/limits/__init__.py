"""Rate limits: a request is admitted only if every limit it is subject to has room for it."""
