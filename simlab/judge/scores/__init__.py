"""Scores of live runs: perplexity, questions, problems."""
