#!/usr/bin/env bash
# A training over several machines. Start the same line on each of them, in a checkout of the same commit:
#
#   RDZV_HOST=10.0.0.1 INTERFACE=eth0 NNODES=1:2 configs/cluster/torchrun.sh \
#       --trainer.strategy=ddp --resume=auto --run_dir=/shared/runs/first
#
# The arguments are those of `python -m lit_cifar fit`; devices and machines are counted by torchrun. When a machine is
# lost or comes, the processes are started again on those that are there, and --resume=auto goes on where the last
# checkpoint was written, so --run_dir must be a folder that all machines share.
set -euo pipefail

: "${RDZV_HOST:?name or address of the machine that keeps the rendezvous: the job ends if it is lost}"
: "${INTERFACE:?network interface over which the machines talk, as shown by: ip -brief -4 address}"
NNODES=${NNODES:-2}               # machines; 1:4 means: start with up to four, go on while there is one
NPROC=${NPROC:-gpu}               # processes on this machine, the same on all: a number, or "gpu" for one per GPU
MAX_RESTARTS=${MAX_RESTARTS:-10}  # how often a machine starts its processes again after a failure
RDZV_PORT=${RDZV_PORT:-29400}
RDZV_ID=${RDZV_ID:-lit-cifar}     # machines with the same one belong together; no secret: nothing here has a password
LAST_CALL_S=${LAST_CALL_S:-30}    # how long a start waits for further machines, once the smallest number is there
DEAD_AFTER_S=${DEAD_AFTER_S:-10}  # a machine that is silent for so long counts as lost
SHUTDOWN_S=${SHUTDOWN_S:-100}     # grace period after SIGTERM, for the current step and for saving

refuse() {
    echo "torchrun.sh: $1" >&2
    exit 2
}
read -r _ _ _ address _ < <(ip -oneline -4 address show dev "$INTERFACE") || refuse "INTERFACE=$INTERFACE has no IPv4 address"
address=${address%/*}
read -r keeper _ < <(getent ahostsv4 "$RDZV_HOST") || refuse "RDZV_HOST=$RDZV_HOST has no IPv4 address"
# Said, because torchrun would guess it. RDZV_HOST may lie on another interface; a machine may know itself as 127.0.1.1.
is_host=false
while read -r _ _ _ own _; do
    if [[ ${own%/*} == "$keeper" || $keeper == 127.* ]]; then is_host=true; fi
done < <(ip -oneline -4 address)

export GLOO_SOCKET_IFNAME=$INTERFACE
# Without it, machines that stay while others leave and return look for each other in different places.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$SHUTDOWN_S

conf=is_host=$is_host,join_timeout=600,last_call_timeout=$LAST_CALL_S
conf+=,read_timeout=30,keep_alive_interval=2,keep_alive_max_attempt=$(((DEAD_AFTER_S + 1) / 2))

exec torchrun --nnodes="$NNODES" --nproc-per-node="$NPROC" --max-restarts="$MAX_RESTARTS" --local-addr="$address" \
    --rdzv-backend=c10d --rdzv-endpoint="$keeper:$RDZV_PORT" --rdzv-id="$RDZV_ID" --rdzv-conf="$conf" \
    -m lit_cifar fit "$@"
