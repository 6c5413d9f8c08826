#!/usr/bin/env bash
# A sound job and a broken one, each watched by ddpcheck, on this machine's processor.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

watch() {
    local expected=$1 name=$2
    shift 2
    printf '\n$ ddpcheck run -- torchrun --nproc-per-node 4 examples/train.py %s\n\n' "$*"
    ddpcheck run --name "$name" -- torchrun --standalone --nproc-per-node 4 examples/train.py "$@"
    local status=$?
    printf '\nexit status %s\n' "$status"
    # The demo fails where ddpcheck does not tell the two apart.
    [ "$status" -eq "$expected" ] || { echo "expected $expected" >&2; exit 1; }
}

watch 0 sound
watch 10 broken --mistake bypass
