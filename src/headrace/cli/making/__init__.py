"""Commands that make a model: with random weights, trained, smaller or of another shape."""
