"""Run `raytrec evaluate` as a Ray job.

ray job submit --working-dir . -- python jobs/evaluate.py runs/NAME --data data/ml100k/test
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
