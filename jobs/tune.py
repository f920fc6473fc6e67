"""ray job submit --working-dir . -- python jobs/tune.py CONFIG --space jobs/spaces/synthetic.yaml

Submitted again, it resumes the search, if that was interrupted.
"""

import sys

from raytrec.cli import main

if __name__ == "__main__":
    main(["tune", "--resume-latest", *sys.argv[1:]])
