"""Figures, measured side by side in one run. ``python -m benchmarks [NAME …]``; results lie in ``benchmarks/results``."""
