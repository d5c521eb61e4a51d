"""`python -m unidist`: the same as the `unidist` command, also from a clone that was never installed."""

import sys

from unidist.cli import main

if __name__ == "__main__":
    sys.exit(main())
