"""``python -m boltmesh`` and ``torchrun -m boltmesh``."""

import sys

from boltmesh.cli import main

if __name__ == "__main__":
    # Under -m the first argument is a file of the installation; readers of a job's command line
    # want the program.
    sys.argv[0] = "boltmesh"
    main()
