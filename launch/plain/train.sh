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

pids=()
for ((local_id = 0; local_id < num_local; local_id++)); do
    JAX_LOCAL_PROCESS_ID=$local_id JAX_PROCESS_ID=$((machine * num_local + local_id)) "$@" &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM INT

status=0
for pid in "${pids[@]}"; do
    while true; do # a signal interrupts `wait`
        wait "$pid"
        code=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    ((code > status)) && status=$code
done
exit "$status"
