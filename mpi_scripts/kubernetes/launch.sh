#!/usr/bin/env bash
# What:     the launcher of mpijob.yaml and trainjob.yaml: waits until every worker answers ssh, then trains on all of
#           them with train_multinode.sh. If a worker is told to end, the run stops with a checkpoint (exit code 75)
#           and goes on when all workers answer again. Other failures end the job.
# Hardware: a pod without a GPU.
# Time:     the time of the run.
# Prints:   what train_multinode.sh prints; the workers that do not answer; each restart.
#
# Usage:    mpi_scripts/kubernetes/launch.sh [options of largebatch.train]
#
# Variables, all optional, and those of train_multinode.sh:
#   WAIT_S    seconds until every worker must answer ssh                         (default: 600)
#   RESTARTS  how often a run that was told to end goes on                       (default: 20)
#   HOSTFILE  the workers, as the operator writes them                           (default: /etc/mpi/hostfile)
#   PORT, KEYS  those of worker.sh

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
[[ ${WAIT_S:=600} =~ ^[0-9]+$ ]] || fail "WAIT_S is '$WAIT_S': expected whole seconds, e.g. 600"
[[ ${RESTARTS:=20} =~ ^[0-9]+$ ]] || fail "RESTARTS is '$RESTARTS': expected a whole number, e.g. 20"
HOSTFILE=${HOSTFILE:-/etc/mpi/hostfile} KEYS=${KEYS:-$HOME/.ssh} PORT=${PORT:-2222}
for file in "$HOSTFILE" "$KEYS/id_rsa" "$KEYS/id_rsa.pub"; do
    [ -r "$file" ] || fail "there is no $file that user $(id -un) may read: set HOSTFILE, or KEYS and fsGroup"
done
mapfile -t workers < <(sed 's/#.*//' "$HOSTFILE" | awk 'NF { print $1 }')
[ ${#workers[@]} -gt 0 ] || fail "$HOSTFILE names no worker: expected a line such as 'a slots=8' for each"

# The key of the job is that of each worker's sshd, too, so no other host can take a worker's place.
known=$(mktemp)
trap 'rm -f "$known"' EXIT
sed 's/^/* /' "$KEYS/id_rsa.pub" >"$known"
ssh=(ssh -p "$PORT" -i "$KEYS/id_rsa" -o IdentitiesOnly=yes -o BatchMode=yes -o LogLevel=ERROR -o ConnectTimeout=10
     -o StrictHostKeyChecking=yes -o "UserKnownHostsFile=$known" -o ServerAliveInterval=10 -o ServerAliveCountMax=3)
export OMPI_MCA_plm_rsh_agent="${ssh[*]}" PRTE_MCA_plm_ssh_agent="${ssh[*]}"
export OMPI_MCA_plm_rsh_no_tree_spawn=1 PRTE_MCA_plm_ssh_no_tree_spawn=1   # workers have no such file of known hosts

told='' job=''                                  # SIGTERM: this pod is to end, and Kubernetes starts another one
trap 'told=yes; [ -z "$job" ] || kill -USR1 "$job" 2>/dev/null || true' TERM

wait_for_workers() {
    local limit=$((SECONDS + WAIT_S)) left=("${workers[@]}") silent number tries waited=''
    while :; do
        tries=() silent=()
        for worker in "${left[@]}"; do
            "${ssh[@]}" "$worker" true </dev/null >/dev/null 2>&1 &
            tries+=($!)
        done
        for number in "${!left[@]}"; do wait "${tries[number]}" || silent+=("${left[number]}"); done
        [ -z "$told" ] || exit 75
        [ ${#silent[@]} -gt 0 ] || return 0
        [ -n "$waited" ] ||
            echo "${0##*/}: waiting up to $WAIT_S s for ssh to ${silent[*]}" >&2
        left=("${silent[@]}") waited=yes
        [ "$SECONDS" -lt "$limit" ] ||
            fail "no answer to ssh in $WAIT_S s from ${left[*]}: kubectl describe pod says why; WAIT_S allows more"
        sleep 1
    done
}

for ((restart = 1; ; restart++)); do
    wait_for_workers
    "$ROOT/mpi_scripts/train_multinode.sh" --hostfile "$HOSTFILE" "$@" &
    job=$!
    while kill -0 "$job" 2>/dev/null; do wait "$job" || true; done     # a signal interrupts wait, not the job
    wait "$job" && code=0 || code=$?
    job=''
    if [ "$code" != 75 ] || [ -n "$told" ] || [ "$restart" -gt "$RESTARTS" ]; then exit "$code"; fi
    echo "${0##*/}: the run was told to end; restart $restart of $RESTARTS, when all workers answer ssh" >&2
done
