"""From what is read to seconds: fitting, foretelling and checking the time of a token."""
