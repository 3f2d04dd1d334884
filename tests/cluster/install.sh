#!/usr/bin/env bash
# What:     installs the packages that the tests of this folder need: for several hosts on one machine (iproute2,
#           util-linux, OpenSSH), and for a Slurm with munge; and mmdebstrap, with which tests/test_install.py gets the
#           compilers of Debian 13. Starts no daemon: the tests start their own, in their own namespaces.
# Hardware: any Debian or Ubuntu with root and a package mirror; 120 MB of disk.
# Time:     about 10 seconds; none if everything is installed.
# Prints:   one line about the packages that were found or installed. If that fails, the reason and the remedy, with
#           exit code 1; the tests are then skipped, each with its reason.
#
# Usage:    sudo tests/cluster/install.sh

set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin
PACKAGES=(iproute2 util-linux openssh-server openssh-client munge
          slurmctld slurmd slurm-client slurm-wlm-basic-plugins
          libpmix-dev               # srun --mpi=pmix loads libpmix.so, without a version number
          mmdebstrap debian-archive-keyring)
COMMANDS=(ip tc unshare nsenter setpriv sshd ssh ssh-keygen munged slurmctld slurmd srun sbatch mmdebstrap)
POLICY=/usr/sbin/policy-rc.d

say() { printf '%s\n' "tests/cluster/install.sh: $*"; }

missing() {                         # prints the members of COMMANDS that are missing
    local command
    for command in "${COMMANDS[@]}"; do
        command -v "$command" >/dev/null 2>&1 || printf ' %s' "$command"
    done
    compgen -G '/usr/lib/*/libpmix.so' >/dev/null || printf ' libpmix.so'
}

lacking=$(missing)
[ -n "$lacking" ] || { say "everything is installed"; exit 0; }
[ "$(id -u)" = 0 ] || { say "missing:$lacking. Run it as root: sudo tests/cluster/install.sh" >&2; exit 1; }
command -v apt-get >/dev/null 2>&1 ||
    { say "missing:$lacking, and there is no apt-get: install them with this system's package manager" >&2; exit 1; }

if [ ! -e $POLICY ]; then           # exit code 101 keeps dpkg from starting the daemons that it installs
    printf '#!/bin/sh\nexit 101\n' >$POLICY
    chmod +x $POLICY
    trap 'rm -f "$POLICY"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
{ timeout 300 apt-get -o DPkg::Lock::Timeout=120 update -q && timeout 300 apt-get -o DPkg::Lock::Timeout=120 install -qy --no-install-recommends "${PACKAGES[@]}"; } \
    >"$log" 2>&1 </dev/null ||
    { say "apt-get failed, see $log: check the network and the package mirror (/etc/apt/sources.list)" >&2; exit 1; }
lacking=$(missing)
[ -z "$lacking" ] || { say "installed ${PACKAGES[*]}, but still missing:$lacking, see $log" >&2; exit 1; }
rm -f "$log"
say "installed ${PACKAGES[*]}"
