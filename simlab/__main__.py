"""`python -m simlab` is the `simlab` command."""

from simlab.cli.main import entry

entry()
