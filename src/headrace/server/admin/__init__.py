"""The admin API: tenants, keys, fast mode, cache invalidation, usage export and the audit log."""
