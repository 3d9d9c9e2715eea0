"""Families with recurrent layers beside or instead of attention."""
