#!/bin/sh
# Create the secrets of compose.yaml (the tokens of Ray and JupyterLab) and .env.
# A second run changes nothing. For new tokens, run `rm -r deploy/secrets` first.
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
[ "$(id -u)" -ne 0 ] || chown "$uid" secrets/* # the user of the containers
[ -e .env ] || echo "RAYTREC_UID=$uid" >.env
echo "tokens: $(pwd)/secrets; containers run as user $uid"
