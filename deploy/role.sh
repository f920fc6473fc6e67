#!/bin/sh
# Run the role of a raytrec container: head, worker, mlflow or notebook. Any other argument is a command.
# Arguments after head or worker go to `ray start`.
set -eu

fail() { # WHAT EXPECTED, printed like raytrec's own errors
    printf 'error: %s\n  where:    %s\n  expected: %s\n' "$1" "$role" "$2" >&2
    exit 1
}

secret() { # FILE: set $value to its content, which must be too long to guess
    [ -r "$1" ] || fail "user $(id -u) cannot read $1" "a secret mounted at this path (docs/images.md)"
    value=$(cat "$1")
    [ "${#value}" -ge 32 ] || fail "$1 contains only ${#value} characters" "32 or more characters, as written by deploy/init.sh"
}

first() { head -n 1 | cut -d ' ' -f 1; }
own_address() { hostname -i | first; }

# By default, Ray uses 30 % of the memory; if /dev/shm is smaller, Ray places the store on disk. Ray rejects a store
# larger than the memory, and /dev/shm can be larger than the memory. Therefore the limit is half of the memory.
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
    if [ -n "${RAYTREC_HEAD:-}" ]; then # use the network on which workers resolve this name
        address=$(getent ahostsv4 "$RAYTREC_HEAD" | first)
    fi
    starts
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # a head runs no work to wait for
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
    # A stopped worker first announces its end: the run saves a checkpoint and continues without it (docs/fault_tolerance.md).
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-60}"
    # shellcheck disable=SC2046
    exec ray start --address "$RAYTREC_HEAD:6379" --block \
        --node-ip-address "$(own_address)" $(object_store) "$@"
    ;;
mlflow)
    starts
    # MLflow accepts only these host names, as a protection against DNS rebinding.
    exec mlflow server --host 0.0.0.0 --port 5000 --workers 1 \
        --backend-store-uri sqlite:////mlflow/mlflow.db --artifacts-destination /mlflow/artifacts \
        --allowed-hosts "${MLFLOW_NAMES:-mlflow:*,localhost:*,127.0.0.1:*}"
    ;;
notebook)
    [ $# -eq 1 ] || fail "the notebook takes no arguments, got: $*" "settings in files below ~/.jupyter"
    secret "${JUPYTER_TOKEN_FILE:-/run/secrets/jupyter_token}"
    # Jupyter reads the file verbatim, including a final newline. Notebooks could print a token in a variable.
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
