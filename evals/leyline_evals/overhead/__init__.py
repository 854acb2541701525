"""``python -m leyline_evals.overhead``: what traffic that edits nothing pays for Leyline being there."""
