"""Leyline as an SGLang plugin: splices the KV cache in place. Imports no torch at top."""
