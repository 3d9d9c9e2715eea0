"""Degrades service step by step under pressure, as declared for each surface.

trim → max_tokens → variant → stale → extract → refuse
"""
