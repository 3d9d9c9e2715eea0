"""Collections of documents: ingest, chunk, embed, index and search them.

text, files, URLs ──read──▶ blocks ──chunk──▶ chunks ──embed──▶ sqlite and a vector index ──search──▶ hits
"""
