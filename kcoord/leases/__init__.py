"""Who may compile, across nodes."""
