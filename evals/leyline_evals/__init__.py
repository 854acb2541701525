"""Evaluations: debug-gym, mechanism, fidelity, drift."""
