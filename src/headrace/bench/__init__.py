"""Benchmarks: load generator, results, reports, comparison, scheduler simulation, roofline and drills."""
