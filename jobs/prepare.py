"""Run `raytrec prepare` as a Ray job.

ray job submit --working-dir . -- python jobs/prepare.py movielens --source ml-100k --out data/ml100k
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["prepare", *sys.argv[1:]])
