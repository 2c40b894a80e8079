#!/usr/bin/env bash
# Train on this host: launch/local.sh model=lenet epochs=10
# Examine this host: launch/local.sh doctor
# NPROC is the number of ranks: by default one per GPU, or without GPUs one per core.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=functions.sh
source "$here/functions.sh"

find_python
count_ranks
make_work
choose_program "$ranks" "$@"
export DDP_TRAINER_COMMAND=${DDP_TRAINER_COMMAND:-"NPROC=$ranks $(quote "$0" "$@")"}
run_torchrun --rdzv-backend=bound --rdzv-endpoint=127.0.0.1:0
