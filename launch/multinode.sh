#!/usr/bin/env bash
# Train on several hosts, which have the project at the same path. Either run this script on each host,
#
#     NNODES=4 NODE_RANK=1 HEAD=10.0.0.1 launch/multinode.sh model=resnet18 epochs=20
#
# or run it once with HOSTS; it then starts itself on each host over ssh:
#
#     HOSTS="a b c d" launch/multinode.sh model=resnet18 epochs=20
#
# With the word doctor before the settings the script examines the hosts and does not train. The commands evaluate,
# benchmark and plan run on several hosts too.
#
# NNODES=MIN:MAX starts an elastic job: it begins with at least MIN nodes and goes on while so many are left. A node that
# comes late, or again, joins it. Node 0 must not be lost, because torchrun's store is there.
#
# Variables, with their defaults in parentheses:
#   HEAD      name or address of node 0 that is valid on all nodes (the first of HOSTS)
#   PORT      port of torchrun's store on HEAD (29400); each job on that host needs a different port
#   NPROC     ranks on each node (the number of GPUs, or without GPUs the number of usable cores)
#   JOIN_SECONDS  how many seconds the nodes wait for each other at the start (20)
#   MAX_RESTARTS  how many times a rank of an elastic job may be killed and start again (20)
#   PYTHON, SSH   interpreter (.venv, else python3); command that runs a command line on a host (ssh -o BatchMode=yes)
#   DDP_TRAINER_JOB_SECRET  secret text, equal on all nodes, so that no other program can pose as a node at the start
#             (with HOSTS a random text, else none)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=functions.sh
source "$here/functions.sh"

run_here() {
    local address rendezvous compare=()
    local settings=(NNODES="$NNODES" NODE_RANK="$NODE_RANK" HEAD="$HEAD" PORT="$PORT" NPROC="$ranks")
    export DDP_TRAINER_COMMAND=${DDP_TRAINER_COMMAND:-"${settings[*]} $(quote "$0" "$@")"}
    if [[ ${STOP_WITH_STDIN:-} ]]; then # run_over_ssh has started this node; the first line of stdin is the secret
        IFS= read -r DDP_TRAINER_JOB_SECRET || exit 1
        export DDP_TRAINER_JOB_SECRET
    fi
    if [[ $NNODES == *:* ]]; then
        ISOLATED=1 slots=$((${NNODES#*:} * ranks)) first_slot=$((NODE_RANK * ranks))
        choose_program "$slots" "$@" "recovery.min_ranks=$((${NNODES%:*} * ranks))"
        rendezvous=(--rdzv-conf="timeout=120")
    else
        choose_program $((NNODES * ranks)) "$@"
        rendezvous=(--nnodes="$NNODES" --rdzv-conf="rank=$NODE_RANK,timeout=120")
    fi
    if [[ -e $work/job.json ]]; then compare=(job_file="$work/job.json"); fi
    address=$("$python" -m ddp_trainer node-check head="$HEAD" port="$PORT" nnodes="$NNODES" \
        node_rank="$NODE_RANK" timeout="${JOIN_SECONDS:-20}" rdzv_id="$job" "${compare[@]}") || exit $?
    unset DDP_TRAINER_JOB_SECRET
    run_torchrun --rdzv-backend=bound "${rendezvous[@]}" --rdzv-endpoint="$HEAD:$PORT" --rdzv-id="$job" \
        --local-addr="$address"
}

run_over_ssh() {
    local hosts ssh rank command secret pipe pipes=() nodes=() code=0 one interrupted=''
    read -ra hosts <<<"${HOSTS//[,$'\n']/ }"
    read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes}"
    ((${#hosts[@]})) || refuse "HOSTS=$HOSTS must name at least one host"
    command -v -- "${ssh[0]}" >/dev/null || refuse "${ssh[0]} cannot be run: install it, or set SSH to another command"
    NNODES=${NNODES:-${#hosts[@]}} HEAD=${HEAD:-${hosts[0]#*@}}
    choose_program '' "$@" # so that a mistake is reported once, before ssh starts the nodes
    export DDP_TRAINER_COMMAND=${DDP_TRAINER_COMMAND:-"HOSTS=$(quote "$HOSTS") NNODES=$NNODES $(quote "$0" "$@")"}
    secret=${DDP_TRAINER_JOB_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')}
    local variables=(NNODES HEAD PORT NPROC JOIN_SECONDS MAX_RESTARTS PYTHON PYTHONPATH DDP_TRAINER_PLUGINS
        DDP_TRAINER_COMMAND)
    trap '' PIPE # because writing to a node that has ended would end this script
    for rank in "${!hosts[@]}"; do
        command="cd $(quote "$PWD") && env STOP_WITH_STDIN=1 NODE_RANK=$rank"
        for one in "${variables[@]}"; do
            if [[ -n ${!one:-} ]]; then command+=" $(quote "$one=${!one}")"; fi
        done
        command+=" $(quote "$here/multinode.sh" "$@")"
        # A node stops at the end of its stdin, so close the pipes of the earlier nodes in this process.
        exec {pipe}> >(
            for one in "${pipes[@]}"; do exec {one}>&-; done
            exec setsid "${ssh[@]}" "${hosts[rank]}" "$command"
        )
        pipes+=("$pipe") nodes+=("$!")
        { echo "$secret" >&"$pipe"; } 2>/dev/null || : # stdin, because ps shows arguments to all users
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
job=ddp_trainer-$PORT # torchrun's rendezvous id: the same on all nodes and after a restart
if [[ -n ${HOSTS:-} && -z ${NODE_RANK:-} ]]; then
    run_over_ssh "$@"
    exit
fi
if [[ -z ${NNODES:-} || -z ${NODE_RANK:-} || -z ${HEAD:-} ]]; then
    refuse 'NNODES, NODE_RANK or HEAD is missing: set all three on every host, or HOSTS="a b c" on one host'
fi
count_ranks
run_here "$@"
