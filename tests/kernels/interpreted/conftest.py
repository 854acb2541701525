"""These tests run the Triton kernels in Triton's interpreter on the CPU.

Triton decides at its import whether it interprets, so they run in a process of their own with TRITON_INTERPRET=1:
``tests/kernels/test_interpreted.py`` starts it. Collected without that variable, they are left out.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*"]
# The complete product of layouts, dtypes and sizes instead of a covering set; about half an hour on two cores.
COMPLETE = os.environ.get("LEYLINE_KERNEL_MATRIX") == "complete"
