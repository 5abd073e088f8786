"""Packs: many objects in one file, with an index, which a job reads as it starts, and which `export` and `import` move."""
