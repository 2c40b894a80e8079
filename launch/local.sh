#!/usr/bin/env bash
# Train on this host: launch/local.sh model=lenet epochs=10
# or examine it: launch/local.sh doctor. NPROC ranks; unless set, one a GPU, and without GPUs one a core.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=functions.sh
source "$here/functions.sh"

find_python
count_ranks
make_work
choose_program "$ranks" "$@"
export DDP_TRAINER_COMMAND=${DDP_TRAINER_COMMAND:-"NPROC=$ranks $(quote "$0" "$@")"}
supervise "$python" -m ddp_trainer.agent --standalone --nproc_per_node="$ranks" \
    --log_dir="$work/torchrun" "${program[@]}"
