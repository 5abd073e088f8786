"""A Triton backend outside Triton's tree, for a GPU that need not be there: its driver answers, and launches nothing."""
