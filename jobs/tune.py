"""Run `raytrec tune` as a Ray job; a second submission resumes an interrupted search.

ray job submit --working-dir . -- python jobs/tune.py CONFIG --space jobs/spaces/synthetic.yaml
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["tune", "--resume-latest", *sys.argv[1:]])
