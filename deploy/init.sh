#!/bin/sh
# Makes what compose.yaml needs and nobody else may know: the tokens of Ray and of JupyterLab, and .env.
# Again, it changes nothing: new tokens only after `rm -r deploy/secrets`.
set -eu
cd "$(dirname "$0")"
uid=$(id -u)
[ "$uid" -ne 0 ] || uid=1000 # no container runs as root

umask 077
mkdir -p secrets
for name in ray_token jupyter_token; do
    [ -e "secrets/$name" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"secrets/$name"
done
chmod 600 secrets/*
[ "$(id -u)" -ne 0 ] || chown "$uid" secrets/* # whom the containers run as
[ -e .env ] || echo "RAYTREC_UID=$uid" >.env
echo "tokens: $(pwd)/secrets; containers run as user $uid"
