"""`python -m pagedkv`: the command line."""

import sys

from pagedkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
