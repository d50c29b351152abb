"""Lets a program answer orders in a process that may die: ``child_server.py PROGRAM``, under the user's own Python.

Orders come as JSON lines on stdin; PROGRAM, a file, has a function ``answer`` that takes one and returns what goes out
as a JSON line. ``worker.py`` starts and watches the process. Self-contained: any Python from 3.8.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback

# A program must not find what lies beside this file, such as a `statistics.py`, in place of Python's own.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]


def main() -> None:
    # Libraries print to stdout: that goes where their errors go, and the answers keep a way of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    ask = runpy.run_path(sys.argv[1])["answer"]
    for line in sys.stdin:
        try:
            answer = ask(json.loads(line))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            cause = cause_of(error)
            text = " ".join(str(cause).split())[:500] or repr(cause)
            answer = {"error": text, "kind": type(cause).__name__, "trace": traceback.format_exc()[-4000:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def cause_of(error: BaseException) -> BaseException:
    """What a rank met: a CheckpointException of torch has a traceback of each as its text."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


if __name__ == "__main__":
    main()
