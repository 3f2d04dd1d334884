#!/usr/bin/env bash
# What:     trains on several hosts over ssh, with Open MPI: fills the slots of one host after the other, binds each
#           rank near its GPU, and hands on only the variables that env.sh lists. With --restarts, a run that a lost
#           host ended goes on with the hosts that answer.
# Hardware: hosts that reach each other by ssh without a password, see the same repository and .venv under the same
#           path, and the same data. Check them first: python -m largebatch.doctor --hosts a:8,b:8
# Time:     the time of the run; it starts within seconds.
# Prints:   the command, one line of bind.sh per host, then what largebatch.train prints; before a restart, the exit
#           code of the run, the hosts that do not answer, and the pause.
#
# Usage:    mpi_scripts/train_multinode.sh [--restarts N] -H a:8,b:8 [options of largebatch.train]
#           mpi_scripts/train_multinode.sh [--restarts N] --hostfile FILE [options of largebatch.train]
# FILE has a line per host: "a slots=8". The same command again resumes the run.
# --restarts N: start a run that failed again, at most N times, on all hosts that answer ssh then. A run that is
#           complete, was told to end (exit code 75, or a signal to this script) or has a mistake in its options (2)
#           is not started again.
#
# Variables, all optional: RANKS (default: all slots), PAUSE_S (whole seconds before a restart, default 30), and those
#           of env.sh: INTERFACE, TRAVEL, VENV

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

restarts=0
if [ "${1:-}" = --restarts ]; then
    [[ ${2:-} =~ ^[0-9]+$ ]] || fail "--restarts is '${2:-}': expected how often a lost run may start again, e.g. 3"
    restarts=$2
    [[ ${PAUSE_S:=30} =~ ^[0-9]+$ ]] || fail "PAUSE_S is '$PAUSE_S': expected whole seconds before a restart, e.g. 30"
    shift 2
fi
case ${1:-} in
    -H | --host | --hostfile) [ $# -ge 2 ] || fail "$1 needs a value, e.g. -H a:8,b:8" ;;
    *) fail "give the hosts first, -H a:8,b:8 or --hostfile FILE, and then the options of largebatch.train" ;;
esac
hosts=("$1" "$2")
shift 2

prepare() {                                     # the command for hosts: $1 ranks, or empty; $2... the hosts for mpirun
    local ranks=$1
    shift
    command=("${MPIRUN[@]}" "$@" ${ranks:+-np "$ranks"} "$ROOT/mpi_scripts/bind.sh"
             "$VENV/bin/python" -m largebatch.train "${options[@]}")
    print "${command[@]}"
}

read_hostfile() {                               # as mpirun reads it, which refuses some with a guess
    local file=$1 name rest text
    [ -r "$file" ] || fail "--hostfile is $file: there is no such file, or it cannot be read"
    [ -f "$file" ] || [ "$restarts" -gt 0 ] || return 0     # a pipe can be read once, by mpirun
    text=$(sed 's/#.*//; s/[[:space:]]*=[[:space:]]*/=/g' "$file")      # mpirun takes "slots = 8" as well
    [[ $text != *$'\r'* ]] || fail "$file has the line ends of Windows, which mpirun refuses: sed -i 's/\r$//' $(printf %q "$file")"
    while read -r name rest; do
        [ -n "$name" ] || continue
        [[ $name != *:* ]] || fail "$file names the host $name: mpirun takes a name or an IPv4 address, then slots=8"
        if [[ " $rest" =~ [[:space:]](slots|count|cpu)=([0-9]+) ]]; then places+=("$name:${BASH_REMATCH[2]}")
        elif [ "$restarts" -gt 0 ]; then
            fail "$file does not say how many slots $name has, which --restarts needs: write '$name slots=8'"
        fi
    done <<<"$text"
}

places=()                                       # "name:slots" of each host, for a restart
if [ "${hosts[0]}" = --hostfile ]; then read_hostfile "${hosts[1]}"
else
    IFS=, read -ra places <<<"${hosts[1]}"
    for number in "${!places[@]}"; do
        [[ ${places[number]} == *:* ]] || places[number]+=:1    # as mpirun reads it
    done
fi

options=("$@")
prepare "${RANKS:-}" "${hosts[@]}"
[ "$restarts" -gt 0 ] || exec "${command[@]}"  # signals then reach mpirun itself

answers() {                                     # a host needs no ssh to itself
    case $1 in localhost | "$(hostname)" | "$(hostname -s)") return ;; esac
    ssh -o BatchMode=yes -o ConnectTimeout=10 "$1" true </dev/null >/dev/null 2>&1
}

# A terminal sends Ctrl-C to mpirun as well; other signals come to this script alone.
told='' heard='' job=''
hear() {
    told=yes heard=yes
    [ "$1" = INT ] || [ -z "$job" ] || kill "-$1" "$job" 2>/dev/null || true
}
for name in INT TERM USR1 USR2; do
    # shellcheck disable=SC2064  # the name as it is now
    trap "hear $name" "$name"
done
attend() {                                      # runs the command, which gets the signals to this script; sets failed
    "${command[@]}" &
    job=$! heard=yes
    while [ -n "$heard" ]; do                   # a signal ends the wait, but not the command
        heard='' failed=0
        wait "$job" || failed=$?
    done
    job=''
}

for ((restart = 1; ; restart++)); do
    attend
    case $failed in 0 | 2 | 75) exit "$failed" ;; esac
    if [ -n "$told" ] || [ "$restart" -gt "$restarts" ]; then exit "$failed"; fi
    kept=() lost=() slots=0
    for place in "${places[@]}"; do
        if answers "${place%:*}"; then
            kept+=("$place") slots=$((slots + ${place##*:}))
        else
            lost+=("${place%:*}")
        fi
    done
    [ ${#kept[@]} -gt 0 ] || fail "the run ended with exit code $failed, and no host answers ssh: ${lost[*]}"
    where=$(IFS=,; echo "${kept[*]}")
    printf '%s\n' "${0##*/}: the run ended with exit code $failed. Hosts that do not answer ssh: ${lost[*]:-none}." \
        "${0##*/}: restart $restart of $restarts on $where, in $PAUSE_S s." >&2
    for ((left = 10#$PAUSE_S; left > 0; left--)); do
        [ -z "$told" ] || break                 # a signal is heard when a second is over
        sleep 1 || true                         # Ctrl-C ends it as well
    done
    [ -z "$told" ] || exit "$failed"
    ranks=${RANKS:-}
    [ -z "$ranks" ] || [ "$ranks" -le "$slots" ] || ranks=$slots
    prepare "$ranks" -H "$where"
done
