"""What happened, counted and told."""
