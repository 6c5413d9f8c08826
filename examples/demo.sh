#!/usr/bin/env bash
# Runs a healthy job and a faulty one under ddpcheck, on CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

watch() {
    local expected=$1 name=$2
    shift 2
    printf '\n$ ddpcheck run -- torchrun --nproc-per-node 4 examples/train.py %s\n\n' "$*"
    ddpcheck run --name "$name" --html "build/demo-$name.html" -- torchrun --standalone --nproc-per-node 4 examples/train.py "$@"
    local status=$?
    printf '\nexit status %s\n' "$status"
    # The demo fails if ddpcheck does not distinguish the two jobs.
    [ "$status" -eq "$expected" ] || { echo "error: expected exit status $expected" >&2; exit 1; }
}

mkdir -p build
watch 0 healthy
watch 10 faulty --mistake bypass

printf '\nPages:  %s\n        %s\n' build/demo-healthy.html build/demo-faulty.html
