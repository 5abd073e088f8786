"""Benchmarks that measure all ways side by side in one run: ``python -m benchmarks [NAME …]``; results are in ``results/``."""
