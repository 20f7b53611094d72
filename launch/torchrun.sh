#!/usr/bin/env bash
# One machine's part of a run. Start it on every machine with the same arguments; each has its own NODE_RANK:
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/torchrun.sh recipes/hybrid_llama_1b.py --out runs/1b
#
#     NNODES       how many machines; 1 if not set
#     NODE_RANK    which of them this is, from 0
#     MASTER_ADDR  the address of machine 0, as the others reach it
#     MASTER_PORT  a free port there; 29500 if not set
#     NPROC        processes on each machine; as many as it has GPUs if not set
#     CONFIG       an accelerate file of this folder, for DeepSpeed or FSDP2; DDP, started by torchrun, if not set
#     PYTHON       the interpreter; python if not set
#     ACCELERATE_USE_CPU  true to compute on the CPU, with NPROC processes, or 1; a machine without a GPU is refused
#                  otherwise
#
# On SIGTERM or SIGUSR1 the training saves, and this script ends with status 0.
set -euo pipefail

fail() {
    echo "torchrun.sh: $*" >&2
    exit 2
}

check_number() { # name, value, least, most
    if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3 || 10#$2 > $4)); then
        fail "$1 is '$2'; it must be a whole number from $3 to $4."
    fi
}

(($# > 0)) || fail "no program is named; name a recipe, such as recipes/hybrid_tiny.py, and its flags."
python=${PYTHON:-python}
command -v "$python" > /dev/null || fail "there is no '$python'; activate its environment, or set PYTHON."
nnodes=${NNODES:-1} port=${MASTER_PORT:-29500}
on_cpu=${ACCELERATE_USE_CPU:-false}
[[ ${CONFIG:-} != *cpu.yaml ]] || on_cpu=true
if [[ $on_cpu =~ ^(1|[Tt]rue|TRUE|[Yy]es|YES)$ ]]; then
    nproc=${NPROC:-1} most=1024
else
    # A driver that is too old has GPUs to count, and none to use.
    read -r most reason < <("$python" -c '
import torch
reason = "torch sees none"
try:
    torch.cuda.init()
except (RuntimeError, AssertionError) as error:
    reason = str(error).strip().partition("\n")[0]
print(torch.cuda.device_count() if torch.cuda.is_available() else 0, reason)') || true
    [[ ${most:-0} != 0 ]] || fail "there is no GPU that torch can use on $(hostname) (${reason:-no torch}); repair that, or set ACCELERATE_USE_CPU=true to compute on the CPU."
    nproc=${NPROC:-$most}
fi
check_number NNODES "$nnodes" 1 100000
check_number NPROC "$nproc" 1 "$most"
check_number MASTER_PORT "$port" 1 65535
# Without a leading zero, which is octal.
nnodes=$((10#$nnodes)) nproc=$((10#$nproc))
if ((nnodes > 1)); then
    [[ -n ${MASTER_ADDR:-} ]] || fail "MASTER_ADDR is not set; with $nnodes machines it is the address of machine 0."
    [[ -n ${NODE_RANK:-} ]] || fail "NODE_RANK is not set; with $nnodes machines each has its own, from 0."
fi
rank=${NODE_RANK:-0}
check_number NODE_RANK "$rank" 0 $((nnodes - 1))

if [[ -n ${CONFIG:-} ]]; then
    [[ -f $CONFIG ]] || fail "CONFIG is '$CONFIG', and there is no such file; name one of launch/*.yaml."
    launch=("$python" -m accelerate.commands.launch --config_file "$CONFIG" --num_processes $((nnodes * nproc))
        --num_machines "$nnodes" --machine_rank "$rank" --main_process_port "$port")
    ((nnodes == 1)) || launch+=(--main_process_ip "$MASTER_ADDR")
else
    launch=("$python" -m torch.distributed.run --nnodes "$nnodes" --node_rank "$rank" --nproc_per_node "$nproc"
        --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "$port")
fi

# torchrun kills what has not stopped 30 s after a SIGTERM; saving a large student takes longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# torchrun ends at a hangup, even under nohup.
if [[ -n $(trap -p HUP) ]]; then
    export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGQUIT}
fi

# The launchers would die of SIGUSR1, and torchrun ends with an error after SIGTERM: so they hear of neither, and the
# processes that train, their children, are told.
(
    trap '' USR1
    exec "${launch[@]}" "$@"
) &
launcher=$!
trap 'pkill -USR1 -P "$launcher" || kill -TERM "$launcher"' INT TERM USR1
while kill -0 "$launcher" 2> /dev/null; do
    wait "$launcher" || true # a signal to this script ends the wait too
done
wait "$launcher"
