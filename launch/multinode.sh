#!/usr/bin/env bash
# Train on several hosts, on which the project lies at the same place. Either run this on every one of them,
#
#     NNODES=4 NODE_RANK=1 HEAD=10.0.0.1 launch/multinode.sh model=resnet18 epochs=20
#
# or once, to have it run on each over ssh:
#
#     HOSTS="a b c d" launch/multinode.sh model=resnet18 epochs=20
#
# The word doctor before the settings examines the hosts instead of training.
#
# NNODES=MIN:MAX is an elastic job: it goes on while MIN nodes are there, and who comes back joins it.
#   HEAD      name or address of node 0, as all nodes know it (the first of HOSTS)
#   PORT      where torchrun's store listens on it (29400); one for each job on that host
#   NPROC     ranks on a node: the GPUs, else the cores
#   JOIN_SECONDS  how long nodes wait for each other (20)
#   MAX_RESTARTS  how often the ranks of an elastic job may fail (20)
#   PYTHON, SSH   the interpreter; the command that is given a host and a command line (ssh -o BatchMode=yes)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=functions.sh
source "$here/functions.sh"

run_here() {
    local address elastic=() compare=() is_host=0 conf=join_timeout=120
    local settings=(NNODES="$NNODES" NODE_RANK="$NODE_RANK" HEAD="$HEAD" PORT="$PORT" NPROC="$ranks")
    export DDP_TRAINER_COMMAND=${DDP_TRAINER_COMMAND:-"${settings[*]} $(quote "$0" "$@")"}
    if [[ $NNODES == *:* ]]; then
        choose_program '' "$@"
        elastic=(--max-restarts="${MAX_RESTARTS:-20}")
        conf+=,last_call_timeout=5 # seconds that MIN nodes wait for more, in a second round as in the first
        # The shared store of torch 2.14 never tells a node that comes back where the master is.
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    else
        choose_program $((NNODES * ranks)) "$@"
    fi
    if [[ -e $work/config.json ]]; then compare=(--config="$work/config.json"); fi
    address=$("$python" -m ddp_trainer.preflight --head="$HEAD" --port="$PORT" --nnodes="$NNODES" \
        --node-rank="$NODE_RANK" --timeout="${JOIN_SECONDS:-20}" --rdzv-id="$job" "${compare[@]}") || exit $?
    if ((NODE_RANK == 0)); then is_host=1; fi
    supervise "$python" -m ddp_trainer.agent --nnodes="$NNODES" --nproc_per_node="$ranks" "${elastic[@]}" \
        --rdzv_backend=c10d --rdzv_endpoint="$HEAD:$PORT" --rdzv_id="$job" --local_addr="$address" \
        --rdzv_conf="is_host=$is_host,$conf" --log_dir="$work/torchrun" "${program[@]}"
}

run_over_ssh() {
    local hosts ssh rank command pipe pipes=() nodes=() code=0 one interrupted=''
    read -ra hosts <<<"${HOSTS//[,$'\n']/ }"
    read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes}"
    NNODES=${NNODES:-${#hosts[@]}} HEAD=${HEAD:-${hosts[0]#*@}}
    choose_program '' "$@" # so that a mistake is told once, here
    export DDP_TRAINER_COMMAND=${DDP_TRAINER_COMMAND:-"HOSTS=$(quote "$HOSTS") NNODES=$NNODES $(quote "$0" "$@")"}
    local variables=(NNODES HEAD PORT NPROC JOIN_SECONDS MAX_RESTARTS PYTHON PYTHONPATH DDP_TRAINER_COMMAND)
    trap '' PIPE # from writing to a node that has ended
    for rank in "${!hosts[@]}"; do
        command="cd $(quote "$PWD") && env STOP_WITH_STDIN=1 NODE_RANK=$rank"
        for one in "${variables[@]}"; do
            if [[ -n ${!one:-} ]]; then command+=" $(quote "$one=${!one}")"; fi
        done
        command+=" $(quote "$here/multinode.sh" "$@")"
        # The end of its stdin stops a node, so only this script may hold the other end.
        exec {pipe}> >(
            for one in "${pipes[@]}"; do exec {one}>&-; done
            exec setsid "${ssh[@]}" "${hosts[rank]}" "$command"
        )
        pipes+=("$pipe") nodes+=("$!")
    done
    trap 'interrupted=1; for pipe in "${pipes[@]}"; do echo stop >&"$pipe" || :; done 2>/dev/null' INT TERM
    for rank in "${!nodes[@]}"; do
        while :; do
            interrupted='' one=0
            wait "${nodes[rank]}" || one=$?
            if [[ -z $interrupted ]]; then break; fi
        done
        if ((one == 255)); then echo "error: ${ssh[*]} ${hosts[rank]} failed: can this host log in there?" >&2; fi
        if ((code == 0)); then code=$one; fi
    done
    return "$code"
}

find_python
make_work
PORT=${PORT:-29400}
job=ddp_trainer-$PORT # on all nodes alike, and after a restart
if [[ -n ${HOSTS:-} && -z ${NODE_RANK:-} ]]; then
    run_over_ssh "$@"
    exit
fi
if [[ -z ${NNODES:-} || -z ${NODE_RANK:-} || -z ${HEAD:-} ]]; then
    echo 'error: NNODES, NODE_RANK and HEAD say which nodes there are: set them on every host, or HOSTS="a b c" here' >&2
    exit 2
fi
if ! [[ $NNODES =~ ^[0-9]+(:[0-9]+)?$ && $NODE_RANK =~ ^[0-9]+$ && $PORT =~ ^[0-9]+$ ]]; then
    echo "error: NNODES=$NNODES NODE_RANK=$NODE_RANK PORT=$PORT: these are numbers, and NNODES may be MIN:MAX" >&2
    exit 2
fi
count_ranks
run_here "$@"
