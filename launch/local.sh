#!/usr/bin/env bash
# Train on this host: launch/local.sh model=lenet epochs=10
# Run another command: launch/local.sh evaluate outputs/digits-resnet18-ddp
# With ISOLATED=1 and recovery.min_ranks=M, a lost rank is started again while the others train on.
# NPROC is the number of ranks; the default is the number of GPUs, or without GPUs the number of usable cores.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=functions.sh
source "$here/functions.sh"

find_python
run_alone "$@"
count_ranks
make_work
choose_program "$ranks" "$@"
export DDP_TRAINER_COMMAND=${DDP_TRAINER_COMMAND:-"${ISOLATED:+ISOLATED=1 }NPROC=$ranks $(quote "$0" "$@")"}
port=0
if [[ ${ISOLATED:-} ]]; then
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
fi
run_torchrun --rdzv-backend=bound --rdzv-endpoint="127.0.0.1:$port"
