"""Measure any OpenAI-compatible server over HTTP: load, workloads, a light client, figures, results."""
