"""Tenants and API keys, from the configuration and from the admin API, and what they may use."""
