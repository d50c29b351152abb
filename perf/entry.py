"""How the programs of this folder begin and end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from put_back import orderly_end


def program(main: Callable[[], int]) -> NoReturn:
    """Run a program, whose exit status ``main`` returns. SIGTERM ends it as Ctrl-C does: what it made is removed."""
    try:
        with orderly_end():
            sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
