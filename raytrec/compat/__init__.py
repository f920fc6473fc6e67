"""All private names of ray, torch, torchrec, fbgemm and mlflow that raytrec uses, and nothing else.

Each use was checked against the versions in versions.py; tests/compat/test_upstream_surface.py reports names
that a new version has changed. There is one module per library, so importing a module imports no other
library.
"""
