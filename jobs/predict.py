"""Run `raytrec predict` as a Ray job.

ray job submit --working-dir . -- python jobs/predict.py runs/NAME --data data/ml100k/test --out scores
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["predict", *sys.argv[1:]])
