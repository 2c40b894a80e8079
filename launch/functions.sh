# shellcheck shell=bash disable=SC2034 # the scripts that source this file read its variables
# Functions for local.sh and multinode.sh: interpreter, number of ranks, job file, torchrun and its graceful stop.

# Set `python` to the interpreter: PYTHON, else the interpreter in the project's .venv, else python3.
find_python() {
    python=${PYTHON:-$here/../.venv/bin/python}
    if [[ -z ${PYTHON:-} && ! -x $python ]]; then python=python3; fi
    command -v -- "$python" >/dev/null || refuse "PYTHON=$python cannot be run: set PYTHON to a Python with ddp_trainer"
}

refuse() {
    echo "error: $1" >&2
    exit 2
}

# Set `ranks` to the number of ranks on this host: NPROC, else the number of GPUs, else the number of usable cores.
count_ranks() {
    ranks=${NPROC:-}
    if [[ -z $ranks && ${CUDA_VISIBLE_DEVICES-all} =~ ^[^-] ]]; then # empty or -1: no GPU
        ranks=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || ranks=
        if [[ -n $ranks && -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
            ranks=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
        fi
    fi
    if [[ -z $ranks ]]; then
        ranks=$("$python" -c 'from ddp_trainer.cores import usable_cores; print(usable_cores())')
    fi
    [[ $ranks =~ ^[1-9][0-9]{0,4}$ ]] ||
        refuse "NPROC=$ranks must be a number of ranks, at least 1: unset NPROC for one rank per GPU or core"
}

# Create a folder `work` that is removed when the script ends.
make_work() {
    work=$(mktemp -d)
    trap 'rm -rf -- "$work"' EXIT
}

# Run a command of ddp_trainer that needs no ranks, and exit, if the first argument is one.
run_alone() {
    case ${1:-} in
    inspect | predict | export | report | verify | freeze) exec "$python" -m ddp_trainer "$@" ;;
    -h | --help) exec "$python" -m ddp_trainer train --help ;;
    esac
}

# Set `program` to the arguments of Python in each rank: a command, or train with the job file $work/job.json. This
# function composes and checks the config before any rank starts, so that a mistake is reported once. Its first
# argument is the world size (empty if unknown); the others are settings, or a command and its arguments.
choose_program() {
    local world_size=${1:+world_size=$1}
    shift
    case ${1:-} in
    doctor | evaluate | benchmark | plan)
        program=(-m ddp_trainer "$@")
        return
        ;;
    train) shift ;;
    esac
    "$python" -m ddp_trainer freeze "$work/job.json" ${world_size:+"$world_size"} "$@" >/dev/null || exit $?
    program=(-m ddp_trainer train "job_file=$work/job.json")
}

# Run torchrun with these arguments in a new session and return its exit code. The first Ctrl-C or TERM requests a
# graceful stop through the file DDP_TRAINER_STOP_FILE, because torchrun would kill its ranks 30 s after a signal. The
# second kills all ranks at once. With STOP_WITH_STDIN=1 a line on stdin, or the end of stdin, counts as a TERM.
#
# With ISOLATED=1 each rank has a torchrun of its own, which starts the rank again when it was killed. `slots` is then
# the number of ranks on all nodes, and `first_slot` the rank of this node's first one.
run_torchrun() {
    local children=() child rank code=0 one reader='' stopping='' interrupted=''
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}             # or torchrun prints a warning; num_threads sets the threads
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # or torch warns about addresses without a name
    export DDP_TRAINER_STOP_FILE=${DDP_TRAINER_STOP_FILE:-$work/stop}
    trap 'interrupted=1; stop' INT TERM
    trap '' HUP # so that training continues when the terminal is closed
    if [[ ${ISOLATED:-} ]]; then
        export TORCH_ELASTIC_WORKER_IDENTICAL=1 DDP_TRAINER_LOCAL_WORLD_SIZE=$ranks # else torchrun waits for all nodes
        for ((rank = 0; rank < ranks; rank++)); do
            export DDP_TRAINER_LOCAL_RANK=$rank
            start_agent "$work/torchrun-$rank" --nproc-per-node=1 --nnodes="${slots:-$ranks}" --max-restarts="${MAX_RESTARTS:-20}" \
                "$@" --rdzv-conf="rank=$((${first_slot:-0} + rank)),timeout=120"
        done
    else
        start_agent "$work/torchrun" --nproc-per-node="$ranks" "$@"
    fi
    if [[ ${STOP_WITH_STDIN:-} ]]; then
        { while read -r; do kill -TERM $$; done; kill -TERM $$; } <&0 >/dev/null 2>&1 &
        reader=$!
    fi
    for child in "${children[@]}"; do
        while :; do
            interrupted='' one=0
            wait "$child" || one=$?
            if [[ -z $interrupted ]]; then break; fi
        done
        if ((code == 0 || one == 2)); then code=$one; fi
    done
    trap '' INT TERM
    if [[ $reader ]]; then kill "$reader" 2>/dev/null || :; fi
    if [[ $stopping ]]; then rm -f -- "$DDP_TRAINER_STOP_FILE"; fi
    return "$code"
}

# Start torchrun in the background with the log directory $1 and other arguments. When this script is killed, setpriv
# makes the kernel end torchrun, which then stops its ranks gracefully; with ISOLATED=1 they are lost, others go on.
start_agent() {
    local logs=$1
    shift
    setsid setpriv --pdeathsig "$([[ ${ISOLATED:-} ]] && echo KILL || echo TERM)" -- "$python" -m ddp_trainer.launchers.agent --log-dir="$logs" "$@" \
        "${program[@]}" </dev/null &
    children+=("$!")
}

# Request a graceful stop; on the second call kill torchrun and its ranks. Uses the local variables of run_torchrun.
stop() {
    if [[ -z $stopping ]]; then
        stopping=1
        echo "stopping when all ranks have saved; a second Ctrl-C or TERM stops at once" >&2
        touch -- "$DDP_TRAINER_STOP_FILE"
    else
        for child in "${children[@]}"; do
            # shellcheck disable=SC2046  # one word per process id
            kill -KILL $(cat /proc/"$child"/task/*/children 2>/dev/null) "$child" 2>/dev/null || :
        done
    fi
}

# Print the arguments, quoted, as one line from which any POSIX shell reads the same arguments.
quote() {
    local word line=''
    for word in "$@"; do line+="'${word//\'/\'\\\'\'}' "; done
    printf '%s' "${line% }"
}
