"""`python -m millrace` is the command `millrace`."""

from __future__ import annotations

import sys

from millrace.cli import main

sys.exit(main())
