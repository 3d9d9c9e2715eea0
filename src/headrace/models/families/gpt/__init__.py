"""GPT-2 and what followed it: layer norms, and an MLP without a gate."""
