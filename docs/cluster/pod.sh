#!/usr/bin/env bash
# What a pod of pytorchjob.yaml and trainjob.yaml runs:  bash pod.sh RUN_FOLDER RECIPE [SETTINGS]
# The operator sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK and PET_MASTER_ADDR in each pod.
# CONFIG=FILE        another accelerate config than 2node_zero2.yaml (for one pod: zero2.yaml, ddp.yaml)
# DOCTOR=yes         looks at the machines first, and ends where it finds a fault
# Exit codes: 0 the run is finished; 143 it was told to stop (SIGTERM), has a checkpoint, and is to be started again;
# others: it failed.
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

# Pods do not come at the same time: an image has to be pulled, a node to be found. A pod that is told to stop (it is
# preempted, its node is drained) stops the run on all of them.
exec python "$@" --output_dir "$run" "${launch[@]}" --rendezvous_timeout 1800
