"""Makes a model smaller: calibrates on text, quantises layer by layer, and writes a folder that other engines read."""
