#!/usr/bin/env bash
# What a pod of pytorchjob.yaml and trainjob.yaml runs:  bash pod.sh RUN_FOLDER RECIPE [SETTINGS]
# The operator sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK and PET_MASTER_ADDR in each pod.
# CONFIG=FILE        another accelerate config than 2node_zero2.yaml (for one pod: zero2.yaml, ddp.yaml)
# DOCTOR=yes         looks at the machines first, and ends where it finds a fault
# Exit codes: 0 the run is finished; 75 it was told to stop, has a checkpoint, and is to be started again; others: it
# failed.
set -euo pipefail
cd "$(dirname "$0")/../.."

run=$1
shift
machines=()
if [ "$PET_NNODES" -gt 1 ]; then
    machines=(--main_process_ip "$PET_MASTER_ADDR" --machine_rank "$PET_NODE_RANK")
fi
launch=(--config_file "${CONFIG:-accelerate_configs/2node_zero2.yaml}"
    --num_processes $((PET_NNODES * PET_NPROC_PER_NODE)) "${machines[@]}")
if [ -n "${DOCTOR:-}" ]; then
    toolkit doctor "${launch[@]}" --timeout 600
fi

# A pod that is told to stop (it is preempted, its node is drained) tells the others through this file. Without it they
# would take the end of the run, which is in good order, for the end of the training: the job would count as done.
stop=$run.stop
mkdir -p "$(dirname "$run")"
: > "$stop"  # it is there from the beginning, and opened for each look: NFS remembers what is not there
# Pods do not come at the same time: an image has to be pulled, a node to be found.
python "$@" --output_dir "$run" "${launch[@]}" --rendezvous_timeout 1800 &
launcher=$! code=0 told=
end() {
    if [ -z "$told" ]; then  # a second SIGTERM would cut the checkpoint short
        told=yes
        kill -TERM "$launcher" 2>/dev/null || true
    fi
}
trap 'echo stop > "$stop"; end' TERM
while kill -0 "$launcher" 2>/dev/null; do
    if [ -n "$(<"$stop")" ]; then end; fi
    sleep 1
done
wait "$launcher" || code=$?
if [ -n "$told$(<"$stop")" ]; then code=75; fi
exit "$code"
