"""``python -m leyline_evals.bench``: what an edited turn costs next to an append and next to prefilling again."""
