"""FACE the network: wire formats, models that are served, limits and errors of the edge, files and batches."""
