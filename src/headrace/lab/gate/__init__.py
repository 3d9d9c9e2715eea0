"""The gate: may a candidate take the baseline's place? Judged on your own prompts, with a test for each metric."""
