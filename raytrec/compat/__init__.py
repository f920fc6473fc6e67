"""Every private name of ray, torch, torchrec, fbgemm and mlflow that raytrec uses, and nothing else.

Each place was read for the versions in versions.py; tests/compat/test_upstream_surface.py says by name what a
new version has moved. One module a library, so that whoever needs one imports no other.
"""
