"""What a job compiled: recipes, and the profiles that keep them."""
