"""Artifacts: their manifest, their two forms on disk, the store, and signatures."""
