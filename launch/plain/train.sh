#!/bin/bash
# Starts the processes of one machine, without a cluster manager. Run it on every machine with its own index:
#
#   launch/plain/train.sh NUM_MACHINES MACHINE_INDEX FIRST_HOST PROCESSES_PER_MACHINE COMMAND...
#   launch/plain/train.sh 2 0 node0 8 jaxlc train --config=128k:h100 --workdir=/shared/runs/128k ...   # on node0
#   launch/plain/train.sh 2 1 node0 8 jaxlc train --config=128k:h100 --workdir=/shared/runs/128k ...   # on node1
#
# Start one process per GPU, or one per machine: jaxlc divides the GPUs evenly. FIRST_HOST is the name or address of
# machine 0 that all machines reach. The variable PORT sets the port, 9753 by default. SIGTERM and Ctrl-C are passed on
# to all processes of the machine.
#
# If processes end because one of them hung or was lost, all are started again, at most MAX_RESTARTS (20) times; not
# after an error (docs/clusters.md).

set -uo pipefail

if (($# < 5)); then
    echo "usage: $0 NUM_MACHINES MACHINE_INDEX FIRST_HOST PROCESSES_PER_MACHINE COMMAND..." >&2
    exit 2
fi
num_machines=$1 machine=$2 first_host=$3 num_local=$4
shift 4

export JAX_COORDINATOR_ADDRESS="$first_host:${PORT:-9753}"
export JAX_NUM_PROCESSES=$((num_machines * num_local))
export JAX_NUM_LOCAL_PROCESSES=$num_local

pids=() is_stopped=false
trap 'is_stopped=true; kill -TERM "${pids[@]}" 2>/dev/null' TERM INT

# Starts the processes and waits for them: `status` is the largest status, `is_temporary` whether a restart may help.
run_once() {
    local local_id pid code
    pids=() status=0 is_temporary=true
    for ((local_id = 0; local_id < num_local; local_id++)); do
        JAX_LOCAL_PROCESS_ID=$local_id JAX_PROCESS_ID=$((machine * num_local + local_id)) "$@" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        while true; do # a signal interrupts `wait`
            wait "$pid"
            code=$?
            kill -0 "$pid" 2>/dev/null || break
        done
        case "$code" in
        0 | 75 | 134 | 137 | 142 | 143) ;;
        *) is_temporary=false ;;
        esac
        ((code > status)) && status=$code
    done
}

for ((restart = 1; ; restart++)); do
    $is_stopped || run_once "$@"
    if ((status == 0 || restart > ${MAX_RESTARTS:-20})) || $is_stopped || ! $is_temporary; then
        exit "$status"
    fi
    echo "the processes of machine $machine ended with status $status: restart $restart" >&2
    sleep "${RESTART_SECONDS:-10}"
done
