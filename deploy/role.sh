#!/bin/sh
# What a container of raytrec does: head, worker, mlflow or notebook. Anything else is a command.
# Arguments after head or worker go to `ray start`.
set -eu

fail() { # WHAT EXPECTED: as raytrec's own errors look
    printf 'error: %s\n  where:    %s\n  expected: %s\n' "$1" "$role" "$2" >&2
    exit 1
}

secret() { # FILE: what it holds, which has to be enough that nobody guesses it
    [ -r "$1" ] || fail "there is no $1 that user $(id -u) can read" "a secret, mounted as that file (docs/images.md)"
    value=$(cat "$1")
    [ "${#value}" -ge 32 ] || fail "$1 holds ${#value} characters" "32 or more, such as deploy/init.sh writes"
}

first() { head -n 1 | cut -d ' ' -f 1; }
own_address() { hostname -i | first; }

# Ray would take 30 % of the memory and, where /dev/shm is smaller, put all of it on the disk instead. More than the
# machine has it refuses, and /dev/shm may be larger than that: half of it at most.
object_store() {
    bytes=$(($(df --block-size=1 --output=avail /dev/shm | tail -n 1) * 9 / 10))
    most=$(($(sed -n 's/^MemTotal: *\([0-9]*\) kB$/\1/p' /proc/meminfo) * 512))
    [ "$bytes" -lt "$most" ] || bytes=$most
    [ "$bytes" -lt 134217728 ] || echo "--object-store-memory=$bytes"
}

starts() { echo "$role" >/tmp/role; } # health.py reads it

role=${1:-help}
case $role in
head)
    shift
    secret "$RAY_AUTH_TOKEN_PATH"
    if [ -n "${RAYTREC_HEAD:-}" ]; then # of several networks, the one on which workers know it by this name
        address=$(getent ahostsv4 "$RAYTREC_HEAD" | first)
    fi
    starts
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # nothing of a run's is left to wait for on a head
    # shellcheck disable=SC2046 # an option or nothing
    exec ray start --head --block --port 6379 \
        --node-ip-address "${address:-$(own_address)}" $(object_store) \
        --dashboard-host 0.0.0.0 --dashboard-port 8265 --ray-client-server-port 10001 "$@"
    ;;
worker)
    shift
    secret "$RAY_AUTH_TOKEN_PATH"
    [ -n "${RAYTREC_HEAD:-}" ] || fail "RAYTREC_HEAD is not set" "the host name of the head"
    starts
    # Told to stop, a worker's Ray announces it first: the run checkpoints and continues without it (docs/fault_tolerance.md).
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-60}"
    # shellcheck disable=SC2046
    exec ray start --address "$RAYTREC_HEAD:6379" --block \
        --node-ip-address "$(own_address)" $(object_store) "$@"
    ;;
mlflow)
    starts
    # Its guard against pages that rebind host names: these names are ours.
    exec mlflow server --host 0.0.0.0 --port 5000 --workers 1 \
        --backend-store-uri sqlite:////mlflow/mlflow.db --artifacts-destination /mlflow/artifacts \
        --allowed-hosts "${MLFLOW_NAMES:-mlflow:*,localhost:*,127.0.0.1:*}"
    ;;
notebook)
    [ $# -eq 1 ] || fail "the notebook takes no arguments, got: $*" "settings as files below ~/.jupyter"
    secret "${JUPYTER_TOKEN_FILE:-/run/secrets/jupyter_token}"
    # Jupyter takes the file as it is, a line's end included; and in a variable, notebooks could print it.
    export JUPYTER_TOKEN_FILE="$HOME/.jupyter-token"
    (umask 077 && printf %s "$value" >"$JUPYTER_TOKEN_FILE")
    starts
    cd "$HOME"
    exec jupyter lab --ip 0.0.0.0 --port 8888 --no-browser
    ;;
help)
    echo "roles: head, worker, mlflow, notebook; or a command, such as: raytrec --help"
    ;;
*)
    exec "$@"
    ;;
esac
