"""Benchmarks that measure ways side by side in one run. ``python -m benchmarks [NAME …]``; results in ``benchmarks/results``."""
