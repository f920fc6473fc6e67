"""Run `raytrec train` as a Ray job; a second submission resumes an interrupted run.

ray job submit --working-dir . -- python jobs/train.py jobs/movielens.yaml scaling.num_workers=2
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["train", "--resume-latest", *sys.argv[1:]])
