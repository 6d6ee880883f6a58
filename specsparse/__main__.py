"""`python -m specsparse <command>`."""

import sys

from specsparse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
