"""A worker process: `python -m headrace.engine.process`. See worker_program.

Collects no garbage while it starts, because nothing that a start makes is garbage.
"""

import gc
import sys

gc.disable()

from headrace.engine.process.worker_program import main  # noqa: E402 - after the collector is off

sys.exit(main())
