"""What an operator changes while gateways run: tenants, keys, fast mode, caches; and the log of who changed what."""
