"""CHOOSE who answers: rules, splits, cascades, hedges, fallback chains, and the health of what they choose among."""
