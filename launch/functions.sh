# shellcheck shell=bash disable=SC2034 # the scripts that source this file read its variables
# Functions of local.sh and multinode.sh: the interpreter, the number of ranks, the job file, the graceful stop.

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
        ranks=$("$python" -c 'from ddp_trainer.distributed.environment import usable_cores; print(usable_cores())')
    fi
    [[ $ranks =~ ^[1-9][0-9]{0,4}$ ]] ||
        refuse "NPROC=$ranks must be a number of ranks, at least 1: unset NPROC for one rank per GPU or core"
}

# Create a folder `work` that is removed when the script ends.
make_work() {
    work=$(mktemp -d)
    trap 'rm -rf -- "$work"' EXIT
}

# Set `program` to Python's arguments in each rank: the doctor, or the training of the job file $work/job.json. The
# config is composed and checked once, here, so that a mistake is one error and nothing starts. The first argument
# of this function is the number of ranks, empty if it is not known.
choose_program() {
    local world_size=${1:+world_size=$1}
    shift
    if [[ ${1:-} == doctor ]]; then
        program=(-m ddp_trainer "$@")
        return
    fi
    "$python" -m ddp_trainer freeze "$work/job.json" ${world_size:+"$world_size"} "$@" >/dev/null || exit $?
    program=(-m ddp_trainer train "job_file=$work/job.json")
}

# Run torchrun with these arguments in a session of its own and return its exit code. The first Ctrl-C or TERM requests
# a graceful stop through a file (torchrun would kill its ranks 30 s after a signal), the second kills all ranks at
# once. With STOP_WITH_STDIN=1 a line on stdin, or the end of stdin, counts as a TERM.
run_torchrun() {
    local child code reader='' stopping='' interrupted=''
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}             # or torchrun prints a warning; the key num_threads decides
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # or torch warns about addresses without a name
    export DDP_TRAINER_STOP_FILE=${DDP_TRAINER_STOP_FILE:-$work/stop}
    trap 'interrupted=1; stop' INT TERM
    trap '' HUP # so that training continues when the terminal is closed
    # setpriv ends torchrun, which ends its ranks, when this script is killed
    setsid setpriv --pdeathsig TERM -- "$python" -m ddp_trainer.launchers.agent --nproc-per-node="$ranks" \
        --log-dir="$work/torchrun" "$@" "${program[@]}" </dev/null &
    child=$!
    if [[ ${STOP_WITH_STDIN:-} ]]; then
        { while read -r; do kill -TERM $$; done; kill -TERM $$; } <&0 >/dev/null 2>&1 &
        reader=$!
    fi
    while :; do
        interrupted='' code=0
        wait "$child" || code=$?
        if [[ -z $interrupted ]]; then break; fi
    done
    trap '' INT TERM
    if [[ $reader ]]; then kill "$reader" 2>/dev/null || :; fi
    if [[ $stopping ]]; then rm -f -- "$DDP_TRAINER_STOP_FILE"; fi
    return "$code"
}

# Request a graceful stop, or, the second time, kill torchrun and its ranks. Uses the variables of run_torchrun.
stop() {
    if [[ -z $stopping ]]; then
        stopping=1
        echo "stopping when all ranks have saved; a second Ctrl-C or TERM stops at once" >&2
        touch -- "$DDP_TRAINER_STOP_FILE"
    else
        # shellcheck disable=SC2046  # one word per process id
        kill -KILL $(cat /proc/"$child"/task/*/children 2>/dev/null) "$child" 2>/dev/null || :
    fi
}

# Print arguments as one line that any POSIX shell reads back as the same arguments.
quote() {
    local word line=''
    for word in "$@"; do line+="'${word//\'/\'\\\'\'}' "; done
    printf '%s' "${line% }"
}
