"""Tally: a small expense ledger that reads CSV files and prints monthly reports."""
