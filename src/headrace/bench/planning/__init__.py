"""Capacity planning: devices, precision and parallelism that serve a load within its objectives, and what they cost."""
