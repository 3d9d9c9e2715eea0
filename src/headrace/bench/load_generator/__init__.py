"""Load generator: sends a workload to any OpenAI-compatible server and measures the responses."""
