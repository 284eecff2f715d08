#!/usr/bin/env bash
# The command of the pods in pytorchjob.yaml and trainjob.yaml:  bash pod.sh RUN_FOLDER RECIPE [SETTINGS]
# The operator sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK and PET_MASTER_ADDR in each pod.
# CONFIG=FILE        accelerate config instead of 2node_zero2.yaml (for one pod: zero2.yaml, ddp.yaml)
# DOCTOR=yes         runs `toolkit doctor` first, and ends if it finds a fault
# Exit codes: 0 the run is finished; 143 stopped by SIGTERM with a checkpoint, start it again; others: it failed.
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
    toolkit doctor --num_machines "$PET_NNODES" "${machines[@]}" --rendezvous_timeout 600
fi

# Pods start at different times (pulling an image, waiting for a node), so they wait for each other. If one pod is stopped
# (preempted, its node drained), the run stops on all of them.
exec python "$@" --output_dir "$run" "${launch[@]}" --rendezvous_timeout 1800
