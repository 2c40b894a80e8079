#!/usr/bin/env bash
# Train on several hosts, which have the project at the same path. Either run this on each of them,
#
#     NNODES=4 NODE_RANK=1 HEAD=10.0.0.1 launch/multinode.sh model=resnet18 epochs=20
#
# or run it once, and it starts itself on each host over ssh:
#
#     HOSTS="a b c d" launch/multinode.sh model=resnet18 epochs=20
#
# With the word doctor before the settings it examines the hosts instead of training.
#
# NNODES=MIN:MAX starts an elastic job: it continues while at least MIN nodes run, and a node that comes back rejoins.
# Its rendezvous executes pickles from any client that can reach PORT: use it on a trusted network only.
#
# Variables, with their defaults in parentheses:
#   HEAD      name or address of node 0 that is valid on all nodes (the first of HOSTS)
#   PORT      port of torchrun's store on HEAD (29400); a different one for each job on that host
#   NPROC     ranks on a node (the number of GPUs, or without GPUs of cores)
#   JOIN_SECONDS  seconds that the nodes wait for each other (20)
#   MAX_RESTARTS  how many times the ranks of an elastic job may fail and restart (20)
#   PYTHON, SSH   interpreter (.venv, else python3); command that runs a command line on a host (ssh -o BatchMode=yes)
#   DDP_TRAINER_JOB_SECRET  text that all nodes of the job share, so that no other program can take a node's place
#             at the start; with HOSTS it is random by default
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=functions.sh
source "$here/functions.sh"

run_here() {
    local address rendezvous is_host=0 compare=()
    local settings=(NNODES="$NNODES" NODE_RANK="$NODE_RANK" HEAD="$HEAD" PORT="$PORT" NPROC="$ranks")
    export DDP_TRAINER_COMMAND=${DDP_TRAINER_COMMAND:-"${settings[*]} $(quote "$0" "$@")"}
    if [[ ${STOP_WITH_STDIN:-} ]]; then # started by run_over_ssh: the first line of stdin is the secret
        IFS= read -r DDP_TRAINER_JOB_SECRET || exit 1
        export DDP_TRAINER_JOB_SECRET
    fi
    if [[ $NNODES == *:* ]]; then
        choose_program '' "$@"
        if ((NODE_RANK == 0)); then is_host=1; fi
        # last_call_timeout: how many seconds MIN nodes wait for more nodes, in every rendezvous of the job
        rendezvous=(--rdzv-backend=c10d --rdzv-conf="is_host=$is_host,join_timeout=120,last_call_timeout=5"
            --max-restarts="$restarts")
        # With the shared store of torch 2.14 a node that comes back does not learn the new master's address.
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    else
        choose_program $((NNODES * ranks)) "$@"
        rendezvous=(--rdzv-backend=bound --rdzv-conf="rank=$NODE_RANK,timeout=120")
    fi
    if [[ -e $work/job.json ]]; then compare=(job_file="$work/job.json"); fi
    address=$("$python" -m ddp_trainer node-check head="$HEAD" port="$PORT" nnodes="$NNODES" \
        node_rank="$NODE_RANK" timeout="${JOIN_SECONDS:-20}" rdzv_id="$job" "${compare[@]}") || exit $?
    unset DDP_TRAINER_JOB_SECRET
    run_torchrun --nnodes="$NNODES" "${rendezvous[@]}" --rdzv-endpoint="$HEAD:$PORT" --rdzv-id="$job" \
        --local-addr="$address"
}

run_over_ssh() {
    local hosts ssh rank command secret pipe pipes=() nodes=() code=0 one interrupted=''
    read -ra hosts <<<"${HOSTS//[,$'\n']/ }"
    read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes}"
    ((${#hosts[@]})) || refuse "HOSTS=$HOSTS must name at least one host"
    command -v -- "${ssh[0]}" >/dev/null || refuse "${ssh[0]} cannot be run: install it, or set SSH to another command"
    NNODES=${NNODES:-${#hosts[@]}} HEAD=${HEAD:-${hosts[0]#*@}}
    choose_program '' "$@" # so that a mistake is reported once, here
    export DDP_TRAINER_COMMAND=${DDP_TRAINER_COMMAND:-"HOSTS=$(quote "$HOSTS") NNODES=$NNODES $(quote "$0" "$@")"}
    secret=${DDP_TRAINER_JOB_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')}
    local variables=(NNODES HEAD PORT NPROC JOIN_SECONDS MAX_RESTARTS PYTHON PYTHONPATH DDP_TRAINER_PLUGINS
        DDP_TRAINER_COMMAND)
    trap '' PIPE # so that writing to a node that has ended does not end this script
    for rank in "${!hosts[@]}"; do
        command="cd $(quote "$PWD") && env STOP_WITH_STDIN=1 NODE_RANK=$rank"
        for one in "${variables[@]}"; do
            if [[ -n ${!one:-} ]]; then command+=" $(quote "$one=${!one}")"; fi
        done
        command+=" $(quote "$here/multinode.sh" "$@")"
        # A node stops at the end of its stdin, so no other process may hold the write end.
        exec {pipe}> >(
            for one in "${pipes[@]}"; do exec {one}>&-; done
            exec setsid "${ssh[@]}" "${hosts[rank]}" "$command"
        )
        pipes+=("$pipe") nodes+=("$!")
        { echo "$secret" >&"$pipe"; } 2>/dev/null || : # on stdin, because ps shows arguments to all users
    done
    trap 'interrupted=1; for pipe in "${pipes[@]}"; do echo stop >&"$pipe" || :; done 2>/dev/null' INT TERM
    for rank in "${!nodes[@]}"; do
        while :; do
            interrupted='' one=0
            wait "${nodes[rank]}" || one=$?
            if [[ -z $interrupted ]]; then break; fi
        done
        if ((one == 255)); then
            echo "error: ${ssh[*]} ${hosts[rank]} failed: check that this host can log in there" >&2
            one=1
        fi
        if ((code == 0 || one == 2)); then code=$one; fi
    done
    return "$code"
}

find_python
make_work
PORT=${PORT:-29400} restarts=${MAX_RESTARTS:-20}
number='(0|[1-9][0-9]{0,4})' # bash would read 08 as octal
[[ ${NNODES:-1} =~ ^[1-9][0-9]{0,4}(:$number)?$ && "${NODE_RANK:-0} $PORT $restarts" =~ ^($number( |$)){3}$ ]] ||
    refuse "NNODES=${NNODES:-} (or MIN:MAX, from 1), NODE_RANK=${NODE_RANK:-}, PORT=$PORT and MAX_RESTARTS=$restarts must be whole numbers without leading zeros, 8 and not 08"
job=ddp_trainer-$PORT # the same on all nodes, and after a restart
if [[ -n ${HOSTS:-} && -z ${NODE_RANK:-} ]]; then
    run_over_ssh "$@"
    exit
fi
if [[ -z ${NNODES:-} || -z ${NODE_RANK:-} || -z ${HEAD:-} ]]; then
    refuse 'NNODES, NODE_RANK or HEAD is missing: set all three on every host, or HOSTS="a b c" on one host'
fi
count_ranks
run_here "$@"
