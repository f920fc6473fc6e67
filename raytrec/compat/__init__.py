"""Every private name of ray, torch, torchrec, fbgemm and mlflow that raytrec uses, and nothing else.

Each place was read for the versions in versions.py; tests/compat/test_upstream_surface.py names what a new
version has moved. One module a library, so that importing one imports no other library.
"""
