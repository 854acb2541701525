"""The oracle that tests hold the server against: see `leyline_evals.oracle`."""

from leyline_evals.oracle import Oracle, State, relative_l2

__all__ = ["Oracle", "State", "relative_l2"]
