"""Leases: the right to compile a key, across nodes."""
