"""From what a replay knows to perplexity: a law fitted on a few live margins."""
