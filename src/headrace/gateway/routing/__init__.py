"""Chooses which variants answer a request: rules, splits, cascades, hedges, fallback chains and health."""
