"""SEE it: metrics, and a line in the log for every request. Imported by anyone, imports nobody."""
