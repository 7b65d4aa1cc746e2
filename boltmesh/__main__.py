"""``python -m boltmesh`` and ``torchrun -m boltmesh``."""

import sys

from boltmesh.cli import main

if __name__ == "__main__":
    # Under -m the first argument is a file of the installation; whoever reads the command line
    # of a job wants the program.
    sys.argv[0] = "boltmesh"
    main()
