"""Families that read images beside text."""
