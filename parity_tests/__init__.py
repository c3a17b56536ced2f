"""The parity suite: every implementation, the same inputs, one oracle."""
