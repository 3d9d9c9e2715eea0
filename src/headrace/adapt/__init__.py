"""Adaptation: train a model, or an adapter for it, on your own examples. Needs PyTorch, the extra `train`."""
