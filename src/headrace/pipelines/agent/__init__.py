"""The agent loop of the tools stage: a model calls tools until it knows enough or a budget ends."""
