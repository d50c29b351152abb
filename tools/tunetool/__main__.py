"""``python -m tunetool``."""

from tunetool.cli.main import main

main()
