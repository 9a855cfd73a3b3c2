"""``python -m remat_kit`` is the command line `remat-kit`."""

import sys

from remat_kit._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
