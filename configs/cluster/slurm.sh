#!/usr/bin/env bash
#SBATCH --job-name=lit-cifar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1       # one torchrun on each machine, which starts a process for each GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120       # to this script, so long before the time is up
#SBATCH --no-kill                 # go on with the rest when a machine fails
#SBATCH --requeue                 # queue it again if that was the first machine, or a more urgent job took all of them
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#
# Submit from the checkout, with the interface that connects the machines and a folder that they share:
#
#   INTERFACE=ib0 sbatch configs/cluster/slurm.sh --trainer.strategy=ddp --run_dir=/shared/runs/first
#
# The arguments are those of `python -m lit_cifar fit`. Before its time is up the job saves, asks to be queued again, and
# goes on from there. `scancel` ends it for good.
set -euo pipefail

: "${INTERFACE:?network interface over which the machines talk, e.g. INTERFACE=ib0 sbatch ...}"
read -r RDZV_HOST < <(scontrol show hostnames "$SLURM_JOB_NODELIST") # the first one
export INTERFACE RDZV_HOST NNODES=1:$SLURM_JOB_NUM_NODES RDZV_ID=$SLURM_JOB_ID
export RDZV_PORT=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a machine need different ones

stopping=
stop() {
    stopping=yes
    scancel --signal=TERM "$SLURM_JOB_ID" # to torchrun on every machine, which passes it on; not to this script
}
trap stop USR1

srun --no-kill --kill-on-bad-exit=0 bash configs/cluster/torchrun.sh --resume=auto "$@" &
status=0
wait $! || status=$?
if [[ -n $stopping ]]; then
    wait || true # the first one was cut short by the signal
    scontrol requeue "$SLURM_JOB_ID"
    exit 143
fi
exit "$status"
