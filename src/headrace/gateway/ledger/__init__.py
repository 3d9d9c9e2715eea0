"""Prices, the usage ledger, budgets, budget alerts and the usage export."""
