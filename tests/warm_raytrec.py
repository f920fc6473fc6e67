"""`python -m raytrec`, where the workers of a local Ray are forked by warm.py."""

import os
import sys

import ray._private.ray_constants as constants

constants.SETUP_WORKER_FILENAME = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm_worker.py")
sys.path[0] = os.getcwd()

from raytrec.cli import main  # noqa: E402

main()
