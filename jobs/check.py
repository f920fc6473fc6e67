"""Run `raytrec check` as a Ray job.

ray job submit --working-dir . -- python jobs/check.py jobs/movielens.yaml scaling.num_workers=2
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["check", *sys.argv[1:]])
