# shellcheck shell=bash
# Part of slurm/devcluster: another Debian's Slurm (`up --suite`): its root, and what of this machine is seen in it.

ROOT_PACKAGES=(slurm-wlm slurmdbd munge python3 procps iproute2 ca-certificates g++ libnuma1) # g++: vLLM on the CPU compiles
ROOT_PACKAGES_SID=(apptainer squashfuse fuse-overlayfs)                       # containers, as sites run them
ROOT_OWN=" bin boot dev etc lib lib32 lib64 libx32 lost+found proc run sbin sys usr var " # of /, what is the root's own

ROOT="" # where it lies; empty: Slurm is this machine's
prepare_root() { # unpack (or first make) the root of $SUITE; without one nothing
    [[ -n $SUITE ]] || return 0
    local packages=("${ROOT_PACKAGES[@]}") flags=() code=0
    [[ $SUITE != sid ]] || packages+=("${ROOT_PACKAGES_SID[@]}")
    [[ ${PRIME_HPC_MAKE_ROOTS:-yes} == yes ]] || flags=(--cached)
    ROOT=$DIR/root
    if [[ ! -e $ROOT/.whole || $(<"$ROOT/.whole") != "$SUITE" ]]; then
        rm -rf --one-file-system "$ROOT"
        "$PARTS/../../tools/lib/debian-root" "${flags[@]}" "$SUITE" "$ROOT" "${packages[@]}" || code=$?
        ((code != 3 && code != 4)) || die 4 "there is no Slurm of Debian's $SUITE here: see above"
        ((code == 0)) || die "no root of Debian's $SUITE: see above"
        echo "$SUITE" >"$ROOT/.whole"
    fi
    cp -L /etc/passwd /etc/group /etc/localtime "$ROOT/etc/" 2>/dev/null || true # the same users and hours in both
    touch "$ROOT/etc/hosts" "$ROOT/etc/resolv.conf" # mounted over, by nodes and by containers
    seen_in_root >"$RUN/seen"
}
root_slurm() { # CMD ...: run a command of the Slurm that the cluster has, e.g. to ask for its version
    if [[ -n $ROOT ]]; then chroot "$ROOT" "$@"; else "$@"; fi
}
seen_in_root() { # paths of this machine that are seen in the root under their own names, one a line
    local path name
    for path in /*; do
        name=${path#/}
        [[ $ROOT_OWN == *" $name "* || -L $path || ! -d $path ]] || echo "$path"
    done
    for path in /usr/local "$DIR" "$(readlink -f "$PARTS/../..")"; do
        [[ ! -e $path ]] || own_of_root "$path"
    done
    seen_python "${VIRTUAL_ENV:-$(readlink -f "$PARTS/../..")/.venv}"
}
own_of_root() { # PATH: it, if the root would hide it
    local top=${1#/}
    [[ $ROOT_OWN != *" ${top%%/*} "* ]] || echo "$1"
}
seen_python() { # VENV: the interpreter that it was made with
    local prefix version
    [[ -x $1/bin/python ]] || return 0
    own_of_root "$(readlink -f "$1")"
    read -r prefix version < <("$1/bin/python" -Ic \
        'import sys; print(sys.base_prefix, "python%d.%d" % sys.version_info[:2])')
    if [[ $prefix != /usr ]]; then
        own_of_root "$(readlink -f "$prefix")"
    else # not all of /usr, for that is the root's own: the program and its library
        printf '%s\n' "/usr/bin/$version" "/usr/lib/$version"
    fi
}
