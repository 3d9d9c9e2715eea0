"""Tuning: measures a model under your traffic, applies one level after the other, and keeps what helps and passes."""
