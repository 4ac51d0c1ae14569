#!/usr/bin/env bash
# Start a run on several nodes with torchrun: run this same line on every node.
#
#   NNODES=8 HEAD=node-0 examples/launch_torchrun.sh examples/llama_7b_64gpu.toml training.steps=1000
#
# HEAD is one of the nodes, by a name that the others can resolve; the ranks meet there.
# On one node none of this is needed: `megazero train CONFIG` starts launch.nproc_per_node ranks itself.
set -euo pipefail

NNODES=${NNODES:-1}
NPROC_PER_NODE=${NPROC_PER_NODE:-8} # one rank for each GPU
HEAD=${HEAD:-localhost}
PORT=${PORT:-29500}
RUN_ID=${RUN_ID:-megazero} # the same on all nodes; another one for each run that is up at the same time

if [[ $# -lt 1 ]]; then
    echo "usage: [NNODES=n] [HEAD=host] $0 CONFIG [section.key=value ...]" >&2
    exit 2
fi

# The ranks of a node get consecutive numbers and tp is the innermost axis, so a tp group of up to NPROC_PER_NODE ranks
# never leaves its node.
exec torchrun \
    --nnodes "$NNODES" \
    --nproc_per_node "$NPROC_PER_NODE" \
    --rdzv_id "$RUN_ID" \
    --rdzv_backend c10d \
    --rdzv_endpoint "$HEAD:$PORT" \
    -m megazero.cli train "$@"
