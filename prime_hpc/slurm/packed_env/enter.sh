#!/bin/sh
# Become the Python of a packed environment on this node; the first step of a node brings it there.
#
#   sh enter.sh PACK NODE_LOCAL SHARED_PYTHON ARGUMENT...
#
# Where that is not possible it says why, and becomes the Python on shared storage. Only a shell and coreutils are
# needed, and what unpacks the file: nothing is read from the environment on shared storage.
set -u
pack=$1 named=$2 shared=$3
shift 3
export PRIMEHPC_SHARED_PYTHON="$shared"
trap : USR1 # Slurm's warning must not end this shell: the next look at the time limit sees it
python=$shared
format='' kind='' machine='' version='' hash='' size='' blake2b='' start=unpack root='' env=''
began=$(date +%s)

say() { echo "prime-hpc env: $(uname -n): $*" >&2; }

prepare() {
    while read -r key value; do
        case $key in
            format) format=$value ;; kind) kind=$value ;; machine) machine=$value ;; python) version=$value ;;
            hash) hash=$value ;; size) size=$value ;; blake2b) blake2b=$value ;; start) start=$value ;;
        esac
    done <"$pack.facts" || { say "$pack.facts cannot be read"; return 1; }
    [ "$format" = 2 ] || { say "$pack.facts is of format '$format', this prime-hpc reads 2: pack again"; return 1; }
    [ "$machine" = "$(uname -m)" ] || { say "$pack was made for $machine, this node is $(uname -m)"; return 1; }
    found=$(stat -Lc %s "$pack") || return 1
    [ "$found" = "$size" ] || { say "$pack has $found bytes, not $size: pack again"; return 1; }
    eval "root=\"${named:-/tmp}\"/prime-hpc-$(id -u)" # $USER, $SLURM_JOB_ID and the like are this node's
    mkdir -p "${root%/*}" && { mkdir -m 700 "$root" 2>/dev/null || :; }
    # what lies in it will be executed: nobody else may have prepared it
    if [ -L "$root" ] || [ ! -O "$root" ] || [ "$(stat -c %a "$root")" != 700 ]; then
        say "$root is not a directory of this user alone"
        return 1
    fi
    env=$root/env-$hash
    # unpacked, all steps of the node share the pages of its files; what an earlier job unpacked is used either way
    if [ "$start" = mount ] && [ "$kind" = squashfs ] && [ ! -e "$env" ]; then
        mount_image || bring unpack "$env" || return 1
    else
        bring unpack "$env" || { [ "$kind" = squashfs ] && mount_image; } || return 1
    fi
    told=$("$env/bin/python" -V 2>&1)
    [ "$told" = "Python $version" ] || { say "$pack has Python $version, but its interpreter here says '$told'"; return 1; }
    python=$env/bin/python
}

bring() { # FUNCTION PLACE: once a node, whole or not at all
    [ -e "$2" ] && return 0
    waited=0
    until mkdir "$2.lock" 2>/dev/null; do
        [ -e "$2" ] && return 0
        holder=$(cat "$2.lock/pid" 2>/dev/null)
        if { [ -n "$holder" ] && ! kill -0 "$holder" 2>/dev/null; } || { [ -z "$holder" ] && [ "$waited" -ge 10 ]; }; then
            rm -rf "$2.lock" # whoever held it was killed
        fi
        waited=$((waited + 1))
        [ "$waited" -le 1800 ] || { say "$2.lock is held for half an hour"; return 1; }
        sleep 1
    done
    echo "$$" >"$2.lock/pid"
    if [ ! -e "$2" ]; then
        rm -rf "$2".part*
        if "$1" "$2.part" && mv "$2.part" "$2"; then
            say "brought $pack to $2 in $(($(date +%s) - began)) s"
        else
            rm -rf "$2.part" "$2.lock"
            say "$pack could not be brought to $2 (is there room? $(df -Pk "$root" | awk 'NR == 2 {print int($4 / 1024)}') MiB free)"
            return 1
        fi
    fi
    rm -rf "$2.lock"
}

check_sum() { # FILE
    [ "$(b2sum <"$1" | cut -d' ' -f1)" = "$blake2b" ] || { say "$1 is damaged: its sum is not that of $pack.facts"; return 1; }
}

with_sum() { # LOCKED COMMAND...: the sum is taken beside it, from the same pages; good only where both are
    good=$1.lock/good
    shift
    { check_sum "$pack" && : >"$good"; } &
    sum=$!
    "$@"
    done=$?
    while kill -0 "$sum" 2>/dev/null; do wait "$sum"; done # a trapped signal ends a wait early
    [ "$done" = 0 ] && [ -e "$good" ]
}

copy_image() { with_sum "$env.sqsh" cp "$pack" "$1"; }

mount_image() { # for this step alone: its processes end with the step
    fuse=$(command -v squashfuse_ll || command -v squashfuse) # the first starts a role as quickly as unpacked files do
    if [ -z "$fuse" ] || [ ! -w /dev/fuse ]; then
        say "it cannot be mounted: no squashfuse, or no right to /dev/fuse"
        return 1
    fi
    bring copy_image "$env.sqsh" || return 1
    unmount=$(command -v fusermount3 || echo fusermount)
    for old in "$root"/mnt-*; do # of a mount whose process is gone `-d` is false
        [ -e "$old/bin/python" ] || { "$unmount" -uz "$old"; rmdir "$old"; } 2>/dev/null
    done
    at=$root/mnt-$hash-${SLURM_JOB_ID:-0}-${SLURM_STEP_ID:-$$}-${SLURM_LOCALID:-0}
    [ -e "$at/bin/python" ] && { env=$at; return 0; }
    # Slurm's warnings reach all processes of a step: one that unmounts upon them takes the files from a role that saves
    for _ in 1 2; do # another step that begins may take the empty directory for one that was left
        mkdir -p "$at" 2>/dev/null
        if told=$(trap '' TERM INT HUP USR1 && "$fuse" "$env.sqsh" "$at" 2>&1); then
            say "it is mounted at $at"
            env=$at
            return 0
        fi
    done
    say "it cannot be mounted ($told)"
    rmdir "$at" 2>/dev/null
    return 1
}

unpack() { # FOLDER
    case $kind in
        squashfs) command -v unsquashfs >/dev/null || { say "there is no unsquashfs here"; return 1; } ;;
        tar.zst) command -v zstd >/dev/null || { say "there is no zstd here: pack with --format tar.gz"; return 1; } ;;
    esac
    with_sum "$env" extract "$1"
}

extract() { # FOLDER
    case $kind in
        squashfs) unsquashfs -n -q -d "$1" "$pack" >/dev/null ;;
        tar.zst) mkdir "$1" && zstd -dcq "$pack" | tar -xf - -C "$1" ;;
        tar.gz) mkdir "$1" && gzip -dc "$pack" | tar -xf - -C "$1" ;;
        *) say "$pack is of kind '$kind', which this prime-hpc does not know" && false ;;
    esac
}

prepare || say "$shared is used instead"
trap - USR1
exec "$python" "$@"
