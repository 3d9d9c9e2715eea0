"""Test cases of the gate: your prompts, recordings, task files of other tools, and the red-team set."""
