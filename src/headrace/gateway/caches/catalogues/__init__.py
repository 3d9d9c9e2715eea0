"""Catalogues: approved texts, written before they are asked for."""
