"""What requests cost, whose money it is, and how much of it is left: prices, the ledger, budgets, alerts, export."""
