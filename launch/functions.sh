# shellcheck shell=bash disable=SC2034 # who sources this reads the variables
# What local.sh and multinode.sh share: which python, how many ranks, one frozen config, a soft stop.

# Set `python` to the interpreter: PYTHON, else the project's .venv, else python3.
find_python() {
    python=${PYTHON:-$here/../.venv/bin/python}
    if [[ -z ${PYTHON:-} && ! -x $python ]]; then python=python3; fi
}

# Set `ranks` to the number of ranks on this host: NPROC, else the GPUs, else the usable cores.
count_ranks() {
    ranks=${NPROC:-}
    if [[ -z $ranks && -n ${CUDA_VISIBLE_DEVICES-all} ]]; then
        ranks=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || ranks=
        if [[ -n $ranks && -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
            ranks=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
        fi
    fi
    if [[ -z $ranks ]]; then
        ranks=$("$python" -c 'from ddp_trainer.environment import usable_cores; print(usable_cores())')
    fi
    if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
        echo "error: NPROC=$ranks is no number of ranks: set it from 1, or leave it to the GPUs or cores of this host" >&2
        exit 2
    fi
}

# Make a folder `work` that goes when the script ends.
make_work() {
    work=$(mktemp -d)
    trap 'rm -rf -- "$work"' EXIT
}

# Set `program` to what the ranks run: the doctor, or the config that the rest of the arguments say, composed and
# checked once and frozen in $work/config.json: a bad one is one error, and nothing starts. The first argument is the
# number of ranks, or empty if it will change.
choose_program() {
    local world_size=${1:+--world-size=$1}
    shift
    if [[ ${1:-} == doctor ]]; then
        program=(-m ddp_trainer.doctor "${@:2}")
        return
    fi
    "$python" -m ddp_trainer.job freeze "$work/config.json" ${world_size:+"$world_size"} "$@" >/dev/null || exit $?
    program=(-m ddp_trainer.job run "$work/config.json")
}

# Run a command in a session of its own and return its exit code. The first Ctrl-C or TERM asks the run for a soft
# stop (torchrun would end its ranks for good after 30 s, if it saw the signal), a second one ends it at once. With
# STOP_WITH_STDIN=1 a line on stdin, or its end, is a TERM.
supervise() {
    local child code reader='' asked='' interrupted=''
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}             # num_threads decides; unset, torchrun would talk of it
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # or it warns of addresses that have no name
    export DDP_TRAINER_STOP_FILE=${DDP_TRAINER_STOP_FILE:-$work/stop}
    trap 'interrupted=1; stop' INT TERM
    # setpriv: should this script be killed, torchrun goes too, and its ranks with it
    setsid setpriv --pdeathsig TERM -- "$@" </dev/null &
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
    if [[ $asked ]]; then rm -f -- "$DDP_TRAINER_STOP_FILE"; fi
    return "$code"
}

# Ask for a soft stop, or, asked already, kill torchrun and its ranks. Reads supervise's variables.
stop() {
    if [[ -z $asked ]]; then
        asked=1
        echo "stopping softly, once all ranks have saved; again to stop now" >&2
        touch -- "$DDP_TRAINER_STOP_FILE"
    else
        # shellcheck disable=SC2046  # a word a process id
        kill -KILL $(cat /proc/"$child"/task/*/children 2>/dev/null) "$child" 2>/dev/null || :
    fi
}

# Print arguments as one line that any POSIX shell reads back as the same arguments.
quote() {
    local word line=''
    for word in "$@"; do line+="'${word//\'/\'\\\'\'}' "; done
    printf '%s' "${line% }"
}
