"""The offline report: its page, tables, first sentence and commands."""
