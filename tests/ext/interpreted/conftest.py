"""Collected only where Triton interprets: ``tests/ext/test_interpreted.py`` starts a process that does."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*"]
