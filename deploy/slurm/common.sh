# shellcheck shell=bash
# Sourced by the batch scripts of this folder, which docs/slurm.md describes.
#
#   RL_RUN           name of the run, the same for all its jobs
#   RL_BROKER        address of its broker, for example tls://10.0.0.1:4222; run.sbatch sets it
#   RL_JOBS          folder that all nodes share, for join tokens and the broker's store (runs/$RL_RUN.jobs)
#   RL_MOST_CRASHES  a command that crashes more often in a row ends its job (5)

set -euo pipefail
umask 077

ROLES=(rollout envhub rewardhub)
FINISHED=finished  # in $RL_JOBS once all steps of the run are done
CALM_S=600         # a life of this length makes earlier crashes forgotten
PAUSE_S=${RL_PAUSE_S:-5}  # before a command starts again, or Slurm is asked again
warned=''          # Slurm has announced the time limit
stopping=''        # a signal has asked this job to end
interrupted=''     # a signal has interrupted `wait`
code=0             # of the process that `await` waited for
child=''           # of `keep`

say() { echo "$(date +%FT%T) $*" >&2; }

fail() {
    echo "error: $*" >&2
    exit 2
}

# Check the settings of a job. Usage: require NAME...
require() {
    local name
    for name; do
        [ -n "${!name:-}" ] || fail "$name: not set; sbatch --export=ALL,$name=... $(hint "$name")"
    done
    [[ $RL_RUN =~ ^[A-Za-z0-9_-]{1,64}$ ]] || fail "RL_RUN: '$RL_RUN' is not allowed; 1-64 letters, digits, '_' or '-'"
    RL_JOBS=${RL_JOBS:-${SLURM_SUBMIT_DIR:-$PWD}/runs/$RL_RUN.jobs}
    mkdir -p "$RL_JOBS" || fail "RL_JOBS: '$RL_JOBS' cannot be created; a folder that all nodes share"
}

hint() {
    case $1 in
        RL_RUN) echo "names the run" ;;
        RL_BROKER) echo "names the address of its broker, for example tls://10.0.0.1:4222" ;;
    esac
}

# Print the file of the join token of a role. Usage: token ROLE
token() {
    local file=$RL_JOBS/$1.token invite="rlearner invite $1 --run $RL_RUN --out"
    [ -e "$file" ] || fail "$file: no join token; \`$invite $file --broker URL\` writes it on the broker's node"
    case $(stat -Lc %a "$file") in
        *00) ;;
        *) fail "$file: other users can read this join token; run chmod 600 $file" ;;
    esac
    echo "$file"
}

# Write the join tokens that are missing, once the broker answers. Usage: invite_all URL
invite_all() {
    local role file
    until rlearner invited --broker "$1" >/dev/null 2>&1; do sleep 1; done
    for role in "${ROLES[@]}"; do
        file=$RL_JOBS/$role.token
        [ -e "$file" ] || rlearner invite "$role" --run "$RL_RUN" --expires 30d --out "$file" --broker "$1"
    done
}

# ------------------------------------------------------------------------------------------------ what Slurm says

job() { scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | sed -n 1p; }

# Whether Slurm is not ending this job: it neither cancels nor requeues it, and its time is not over.
is_running() {
    local shown
    shown=$(job) || return 0
    [[ -z $shown || $shown == *" JobState=RUNNING "* ]]
}

# Whether a job of higher priority takes this one's place after its grace time, in which only steps get a SIGTERM.
is_preempted() { [[ $(job || true) =~ \ PreemptTime=[0-9] ]]; }

# Ask all steps to drain. A SIGTERM to srun itself would kill its tasks.
drain_steps() { scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true; }

on_warning() {
    interrupted=1
    [ -z "$warned" ] || return 0
    warned=1
    say "the time limit is near: this job drains, and is requeued"
    drain_steps
}

# Slurm sends a SIGTERM to the steps, too, unless only this script was signalled. A second one would end them at once.
on_term() {
    interrupted=1
    [ -z "$stopping" ] || return 0
    stopping=1
    if is_running; then
        say "this job is asked to stop: it drains"
        drain_steps
    fi
}

trap on_warning USR1
trap on_term TERM

# ------------------------------------------------------------------------------------------------ processes

# Wait for a child, through signals, and set `code`. Usage: await PID
await() {
    while :; do
        interrupted=''
        code=0
        wait "$1" || code=$?
        [ -n "$interrupted" ] || return 0
    done
}

# Run a command as a step of this job, on its GPUs. Usage: step SRUN_OPTION... -- COMMAND...
step() {
    local options=()
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    exec srun --overlap --cpu-bind=none --kill-on-bad-exit=0 --input=none "${options[@]}" "$@"
}

# Before a command that takes --gpus: gives it the GPUs that Slurm gives to its step.
# shellcheck disable=SC2016,SC2034
ON_GPUS=(bash -c '
    [[ " $*" == *" --gpus"* || ! ${CUDA_VISIBLE_DEVICES:-} =~ ^[0-9,]+$ ]] || set -- "$@" --gpus "$CUDA_VISIBLE_DEVICES"
    exec "$@"' on_gpus)

# Run a function or command until it ends without a crash, and set `code`: 0, 2, 130, or that of the last crash.
keep() {
    local crashes=0 began
    while :; do
        began=$SECONDS
        "$@" &
        child=$!
        await "$child"
        case $code in 0 | 2 | 130) return 0 ;; esac
        if [ -n "$warned$stopping" ] || ! is_running || is_preempted; then return 0; fi
        [ $((SECONDS - began)) -lt "$CALM_S" ] || crashes=0
        crashes=$((crashes + 1))
        if [ "$crashes" -gt "${RL_MOST_CRASHES:-5}" ]; then
            say "exit code $code, $crashes times in a row: given up"
            return 0
        fi
        say "exit code $code; starting again"
        sleep "$PAUSE_S"
    done
}

# End the job as its command did: requeue what Slurm interrupts, nothing else. Usage: finish
finish() {
    if ! is_running; then
        say "exit code $code; Slurm ends this job"
    elif [ -e "$RL_JOBS/$FINISHED" ]; then
        say "all steps of run $RL_RUN are done"
        code=0
    elif [ "$code" != 2 ] && { [ -n "$warned" ] || is_preempted; }; then
        requeue
    elif [ "$code" = 130 ]; then
        say "stopped by a user; sbatch starts it again"
        code=0
    fi
    exit "$code"
}

requeue() {
    local _
    for _ in 1 2 3 4 5 6; do
        if scontrol requeue "$SLURM_JOB_ID"; then
            say "exit code $code; requeued"
            exit 0
        fi
        sleep "$PAUSE_S"
    done
    say "exit code $code; could not be requeued"
    exit 1
}

# Run the only step of a job that joins the run. Usage: join ROLE COMMAND...
join() {
    local file
    require RL_RUN
    file=$(token "$1")
    if [ -e "$RL_JOBS/$FINISHED" ]; then
        say "all steps of run $RL_RUN are done: there is nothing to join"
        exit 0
    fi
    shift
    keep step --nodes=1 --ntasks=1 -- "$@" --join "$file"
    finish
}
