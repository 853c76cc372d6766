"""The two kinds of failure a user meets, and the exit status of each."""

from __future__ import annotations


class SimlabError(Exception):
    """Base of everything simlab raises on purpose; its text is the one line shown to the user."""

    exit_status = 1


class InputError(SimlabError):
    """What the user gave cannot be used: a file, an option, a trace without what a policy needs. Exit status 2."""

    exit_status = 2


class RunError(SimlabError):
    """A run on good input failed on the way: an I/O error, a decode that llama.cpp refused. Exit status 1."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does: what was written before is whole, temporary files go."""


class SimlabWarning(UserWarning):
    """Something the user should know while the command goes on; the command line prints it as one line."""
