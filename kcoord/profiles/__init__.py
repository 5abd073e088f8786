"""Profiles: the recipes of a job's compiles, and the artifacts that it requested."""
