"""The sections of the lab: canaries, drift, recordings and what lossy techniques need."""
