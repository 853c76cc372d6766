"""What misses are made of, and where they are."""
