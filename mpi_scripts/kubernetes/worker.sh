#!/usr/bin/env bash
# What:     a worker of mpijob.yaml and trainjob.yaml: sshd as an ordinary user, through which launch.sh starts ranks.
#           If the pod is to end, its ranks get SIGUSR1: the run writes a checkpoint and ends with exit code 75.
# Hardware: a pod with GPUs; its user id needs a name, because ssh and sshd look it up.
# Time:     the time of the run.
# Prints:   what sshd prints.
#
# Usage:    mpi_scripts/kubernetes/worker.sh
#
# Variables, all optional:
#   PORT   of sshd; an ordinary user may not take 22                  (default: 2222)
#   KEYS   the folder with id_rsa and authorized_keys of the job      (default: ~/.ssh)

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
PORT=${PORT:-2222} KEYS=${KEYS:-$HOME/.ssh}
for file in "$KEYS/id_rsa" "$KEYS/authorized_keys"; do
    [ -r "$file" ] || fail "there is no $file that user $(id -un) may read: set sshAuthMountPath, or KEYS, and fsGroup"
done

# The key of the job is the host's, too, so that launch.sh knows each worker. sshd wants its full path.
PATH=$PATH:/usr/sbin:/sbin
"$(command -v sshd)" -D -e -f /dev/null -p "$PORT" -o HostKey="$KEYS/id_rsa" \
    -o AuthorizedKeysFile="$KEYS/authorized_keys" -o PidFile=none -o StrictModes=no -o UsePAM=no \
    -o PasswordAuthentication=no -o MaxStartups=200 &
sshd=$!
ranks=(-u "$(id -u)" -f 'python.* -m largebatch\.train')
tell() {                                        # Kubernetes sends SIGTERM to this process alone, then SIGKILL to all
    pkill -USR1 "${ranks[@]}" || true
    while pgrep "${ranks[@]}" >/dev/null; do sleep 1; done
    kill "$sshd"
    exit 75                                     # with 0, a Job would not replace this pod
}
trap tell TERM
wait "$sshd" || fail "sshd ended with code $?: its lines above say why"
