#!/usr/bin/env bash
# Test and measure raytrec on a GPU that is available for a limited time.
#
#   tests/gpu/lease.sh [--device auto|cpu|cuda] [--seconds 1800] [--only parity,speed] [--out gpu-lease] [--smallest]
#
# Stages run in the order of their value, each with a time limit, until the seconds are used up. After each stage,
# OUT/STAGE.json has the stage's result, OUT/STAGE.log the last 20 kB of its output, and OUT/STAGE-figures.json its
# measurements. Another call skips the stages that passed, so an interrupted call can be continued. The exit status
# is 1 if a stage failed, timed out or was not started. The script installs nothing and needs no network.
#
# PYTHON: interpreter with the packages of requirements/cuda.txt (default: .venv/bin/python).
# Rehearsal without a GPU: tests/gpu/lease.sh --device cpu --smallest
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
stages=(facts parts parity tables runs waits speed order memory faults)
device=auto seconds=1800 only= out=gpu-lease smallest=

die() {
    echo "error: $1" >&2
    exit 2
}

while (($#)); do
    case $1 in
    --smallest) smallest=--smallest ;;
    --device | --seconds | --only | --out)
        (($# > 1)) || die "option $1 requires a value"
        printf -v "${1#--}" %s "$2"
        shift
        ;;
    *) die "unknown option $1" ;;
    esac
    shift
done
for name in ${only//,/ }; do
    [[ " ${stages[*]} " == *" $name "* ]] || die "no stage $name; there are ${stages[*]}"
done
# As in check.py: if an NVIDIA driver is loaded, a torch that finds no GPU is an error.
if [[ $device == auto ]]; then device=$([[ -e /dev/nvidiactl ]] && echo cuda || echo cpu); fi
[[ $device == cpu || $device == cuda ]] || die "unknown device $device; use auto, cpu or cuda"
[[ $seconds =~ ^[0-9]+$ ]] || die "$seconds is not a number of seconds"
command -v "$python" >/dev/null || die "cannot run $python; set PYTHON to an interpreter with raytrec's packages"
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
ended=0

# record STAGE RESULT SECONDS LIMIT_S EXIT_STATUS: replace the stage's JSON file.
record() {
    printf '{"stage": "%s", "result": "%s", "device": "%s", "seconds": %d, "limit_s": %d, "exit_status": %d}\n' \
        "$1" "$2" "$device" "${@:3}" >"$out/$1.json.partial" && mv "$out/$1.json.partial" "$out/$1.json"
    [[ $2 == running ]] || echo "$1: $2, $3 s"
    [[ $2 == running || $2 == passed || $2 == "cannot run here" ]] || ended=1
}

# run STAGE LIMIT_S COMMAND...: run a stage, unless it passed before or was not chosen.
run() {
    local name=$1 limit=$2 began=$SECONDS status result
    shift 2
    [[ -z $only || ",$only," == *",$name,"* ]] || return 0
    if grep -qs '"result": "passed", "device": "'"$device"'"' "$out/$name.json"; then
        echo "$name: passed before"
        return 0
    fi
    if ((limit > seconds - SECONDS)); then limit=$((seconds - SECONDS)); fi
    if ((limit < 1)); then
        record "$name" "not started" 0 0 0
        return 0
    fi
    record "$name" running 0 "$limit" 0
    # SIGINT lets check.py end the processes of its blocks.
    timeout --signal=INT --kill-after=20 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    case $status in
    0) result=passed ;;
    124 | 137) result="timed out" ;;
    *) result=failed ;;
    esac
    tail -c 20000 "$out/$name.log" >"$out/$name.partial" && mv "$out/$name.partial" "$out/$name.log"
    record "$name" "$result" $((SECONDS - began)) "$limit" "$status"
}

# check STAGE LIMIT_S BLOCKS [COMMAND...]: run blocks of check.py, if given as arguments of another command.
check() {
    run "$1" "$2" "${@:4}" "$python" -W ignore "$here/check.py" --device "$device" --only "$3" \
        --out "$out/$1-figures.json" $smallest
}

# cannot_run STAGE: record that the stage is chosen, but not possible on this machine.
cannot_run() {
    [[ -n $only && ",$only," != *",$1,"* ]] || record "$1" "cannot run here" 0 0 0
}

describe() {
    uname -a
    if [[ $device == cuda ]]; then nvidia-smi && nvidia-smi topo -m; fi
    "$python" -c 'from importlib.metadata import distributions
print(*sorted({f"{found.name} {found.version}" for found in distributions()}), sep="\n")'
}
export -f describe
export device python

speed=(--rounds 3 --only "lookup,dense,step,kinds,host")
[[ -z $smallest ]] || speed=(--rounds 1 --only host --no-compiled)

run facts 60 bash -c describe
check parts 240 environment,collectives,parts
check parity 300 parity
check tables 150 adam,uvm
check runs 420 train,resume,figures
check waits 180 syncs,phases
run speed 300 "$python" -W ignore "$root/benchmarks/gpu.py" --device "$device" "${speed[@]}" \
    --out "$out/speed-figures.json"
if [[ $device == cuda ]]; then
    # torch reports accesses to a tensor by two streams without a wait between them.
    check order 120 parts env TORCH_CUDA_SANITIZER=1
else
    cannot_run order
fi
if [[ $device == cuda ]] && command -v compute-sanitizer >/dev/null; then
    check memory 180 adam compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1
else
    cannot_run memory
fi
check faults 420 not_finite,hang,features
exit $ended
