"""Who may call, for whom, and what: tenants and keys, those of the configuration and those made while it runs."""
