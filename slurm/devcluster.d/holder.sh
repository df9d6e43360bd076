#!/usr/bin/env bash
# Part of slurm/devcluster: what holds a node's namespaces. It is pid 1 there, reaps orphans, and its death is a power
# cut. `head` has no pid namespace: it only sleeps.
#
# usage: holder.sh NAME DIR ADDRESS [ROOT]
#
# With ROOT the node's file system is that folder (see root.sh), and of this machine it sees what DIR/run/seen lists.
set -euo pipefail

enter_root() { # ROOT DIR: what this machine's kernel and this checkout bring, then the new root
    local path
    mount --bind "$1" "$1"
    for path in /proc /sys /dev; do mount --rbind "$path" "$1$path"; done
    mount -t tmpfs -o mode=755 tmpfs "$1/run"
    while read -r path; do
        if [[ -d $path ]]; then
            mkdir -p "$1$path"
        elif [[ ! -e $1$path ]]; then
            mkdir -p "${1}${path%/*}" && : >"$1$path"
        fi
        mount --rbind "$path" "$1$path"
    done <"$2/run/seen"
    cd "$1"
    mkdir -p .machine
    # a pivot leaves no way back, and containers may be made below it; in a chroot only another chroot is allowed
    if pivot_root . .machine 2>/dev/null; then umount -l /.machine; fi
}

if [[ $1 != --inside ]]; then
    hostname "$1"
    ip link set lo up
    if [[ $1 == head ]]; then
        ip link add br0 type bridge
        ip addr add "$3/24" dev br0
        ip link set br0 up
    fi
    if [[ -n ${4:-} ]]; then
        enter_root "$4" "$2"
        exec chroot . /bin/bash "$0" --inside "$1" "$2"
    fi
else
    shift
fi
mount --bind "$2/etc/hosts" /etc/hosts
if [[ $1 == head ]]; then
    : >"$2/run/$1.ready"
    exec sleep infinity
fi
mount -t tmpfs -o mode=1777 tmpfs /dev/shm # shared memory is a node's own
: >"$2/run/$1.ready"
while :; do
    sleep 3600 &
    wait $! || true
done
