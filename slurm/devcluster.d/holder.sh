#!/usr/bin/env bash
# Part of slurm/devcluster: what holds a node's namespaces. It is pid 1 there, reaps orphans, and its death is a power
# cut. `head` has no pid namespace: it only sleeps.
#
# usage: holder.sh NAME DIR ADDRESS
set -euo pipefail
hostname "$1"
mount --bind "$2/etc/hosts" /etc/hosts
ip link set lo up
if [[ $1 == head ]]; then
    ip link add br0 type bridge
    ip addr add "$3/24" dev br0
    ip link set br0 up
    : >"$2/run/$1.ready"
    exec sleep infinity
fi
mount -t tmpfs -o mode=1777 tmpfs /dev/shm # shared memory is a node's own
: >"$2/run/$1.ready"
while :; do
    sleep 3600 &
    wait $! || true
done
