"""Observability: metrics and logs. Any layer may import it; it imports none of them."""
