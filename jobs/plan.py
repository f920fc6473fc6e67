"""Run `raytrec plan` as a Ray job.

ray job submit --working-dir . -- python jobs/plan.py jobs/criteo_1tb_8xa100.yaml --on 8xa100-80
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
