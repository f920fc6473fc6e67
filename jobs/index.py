"""Run `raytrec index` as a Ray job.

ray job submit --working-dir . -- python jobs/index.py runs/NAME --items data/films/items --out films
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["index", *sys.argv[1:]])
