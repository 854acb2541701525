"""``python -m leyline_client.cli``."""

import sys

from leyline_client.cli import main

sys.exit(main())
