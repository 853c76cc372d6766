"""The embedded model and its held-out texts."""
