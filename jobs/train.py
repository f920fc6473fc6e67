"""ray job submit --working-dir . -- python jobs/train.py jobs/movielens.yaml scaling.num_workers=2

Submitted again, it resumes the run, if that was interrupted.
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["train", "--resume-latest", *sys.argv[1:]])
