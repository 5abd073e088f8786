"""What an artifact is, on disk."""
