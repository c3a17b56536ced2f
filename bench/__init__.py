"""Benchmark of the TVD loss: every implementation and peer on identical inputs, with one clock."""


class Unavailable(RuntimeError):
    """Something cannot run on this machine; the message says why."""
