#!/usr/bin/env bash
# Start a run on several nodes with torchrun: run this same line on every node.
#
#   NNODES=8 HEAD=node-0 examples/launch_torchrun.sh examples/llama_7b_64gpu.toml training.steps=1000
#   NNODES=5:8 MAX_RESTARTS=100 HEAD=node-0 examples/launch_torchrun.sh CONFIG elastic.enabled=true    # docs/elastic.md
#
# HEAD is one of the nodes, by a name that the others can resolve; the ranks meet there.
# On one node none of this is needed: `megazero train CONFIG` starts launch.nproc_per_node ranks itself.
set -euo pipefail

NNODES=${NNODES:-1}                 # or MIN:MAX
NPROC_PER_NODE=${NPROC_PER_NODE:-8} # one rank for each GPU
HEAD=${HEAD:-localhost}
PORT=${PORT:-29500}
RUN_ID=${RUN_ID:-megazero}        # the same on all nodes; different for runs at the same time
MAX_RESTARTS=${MAX_RESTARTS:-0}   # how often lost ranks are restarted without starting this line again

if [[ $# -lt 1 ]]; then
    echo "usage: [NNODES=n] [HEAD=host] $0 CONFIG [section.key=value ...]" >&2
    exit 2
fi

# Restarted ranks meet at their own store; otherwise torchrun would give them the address of the previous store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds that torchrun gives its ranks to save after a signal; torch 2.11 always uses 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# The command that the end of a run prints to continue it.
export MEGAZERO_LAUNCHER=${MEGAZERO_LAUNCHER:-"NNODES=$NNODES NPROC_PER_NODE=$NPROC_PER_NODE HEAD=$HEAD $0"}
# SIGUSR1 is for the ranks, which finish their step and save; torchrun keeps waiting for them.
trap '' USR1

# The ranks of a node get consecutive numbers and tp is the innermost axis, so a tp group of up to NPROC_PER_NODE ranks
# never leaves its node.
# megazero.torchrun is torchrun, but ends with its ranks' exit code.
exec python -m megazero.torchrun \
    --nnodes "$NNODES" \
    --nproc_per_node "$NPROC_PER_NODE" \
    --max_restarts "$MAX_RESTARTS" \
    --rdzv_id "$RUN_ID" \
    --rdzv_backend c10d \
    --rdzv_endpoint "$HEAD:$PORT" \
    -m megazero.cli train "$@"
