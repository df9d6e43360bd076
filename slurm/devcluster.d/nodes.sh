# shellcheck shell=bash
# Part of slurm/devcluster: namespaces, daemons, and ending exactly what was started.

# ---- processes
remember() { # NAME PID: keep who it is
    start_time "$2" || return 1
    echo "$2 $START" >"$RUN/$1.id"
}
remember_pidfile() { # NAME: the same for a daemon that writes RUN/NAME.pid
    local _ pid
    for _ in {1..100}; do
        { read -r pid <"$RUN/$1.pid"; } 2>/dev/null && remember "$1" "$pid" && return 0
        sleep 0.05
    done
    return 1
}
end() { # NAME [SIGNAL]: end one process of ours; SIGKILL after 10 s
    local i
    if alive "$1"; then
        kill -s "${2:-TERM}" "$ID_PID" 2>/dev/null || true
        for ((i = 0; i < 400; i++)); do
            alive "$1" || break
            sleep 0.025
        done
        ! alive "$1" || kill -s KILL "$ID_PID" 2>/dev/null || true
    fi
    rm -f "$RUN/$1.id"
}
# daemons get a small environment: what `up` was called with must not leak into jobs. fd 9 is this script's lock
CLEAN=(env -i PATH="$PATH" HOME="${HOME:-/}" LANG="${LANG:-C.UTF-8}" SLURM_CONF="$CONF")
daemon() { # LOG CMD ...: start a daemon that goes to the background by itself
    local log=$DIR/log/$1.out
    shift
    "$@" >"$log" 2>&1 </dev/null 9>&- || {
        tail -n 5 "$log" >&2
        return 1
    }
}
parents() { # fills PARENT: pid -> pid of its parent
    local stat pid
    PARENT=()
    for stat in /proc/[0-9]*/stat; do
        { read -r stat <"$stat"; } 2>/dev/null || continue
        pid=${stat%% *} stat=${stat##*) }
        stat=${stat#* }
        PARENT[pid]=${stat%% *}
    done
}
descendants() { # PID ...: they and all their descendants
    local pid grew=yes wanted=" $* " PARENT
    parents
    while [[ $grew == yes ]]; do
        grew=no
        for pid in "${!PARENT[@]}"; do
            if [[ $wanted == *" ${PARENT[pid]} "* && $wanted != *" $pid "* ]]; then wanted+="$pid " grew=yes; fi
        done
    done
    echo "$wanted"
}

# ---- namespaces: a holder process a node (holder.sh)
make_namespaces() { # NAME ADDRESS
    local name=$1 pid i flags=(-n -u -m --propagation slave) PARENT
    [[ $name == head ]] || flags+=(-p --fork --kill-child --mount-proc)
    rm -f "$RUN/$name.ready"
    "${CLEAN[@]}" setsid unshare "${flags[@]}" bash "$PARTS/holder.sh" "$name" "$DIR" "$2" "$ROOT" \
        >"$DIR/log/ns.$name.out" 2>&1 </dev/null 9>&- &
    pid=$!
    for ((i = 0; i < 500; i++)); do
        [[ ! -e $RUN/$name.ready ]] || break
        sleep 0.02
    done
    if [[ ! -e $RUN/$name.ready ]]; then
        tail -n 3 "$DIR/log/ns.$name.out" >&2
        kill -s KILL "$pid" 2>/dev/null || true
        return 1
    fi
    rm -f "$RUN/$name.ready"
    if [[ $name == head ]]; then
        remember head "$pid"
    else
        parents
        for i in "${!PARENT[@]}"; do # unshare's only child is pid 1 of the node
            if [[ ${PARENT[i]} == "$pid" ]]; then remember "$name" "$i"; fi
        done
        plug "$name" "$2" || return 1
    fi
    [[ -z $SHARED_CMD ]] || daemon "shared.$name" in_node "$name" env DEVCLUSTER_SHARED="$DIR" sh -c "${SHARED_CMD//%n/$name}"
}
plug() { # NODE ADDRESS: a cable from the node to the head's bridge
    local node_pid head_pid
    alive head && head_pid=$ID_PID
    alive "$1" && node_pid=$ID_PID
    nsenter -t "$head_pid" -n ip link del "v$1" 2>/dev/null || true # of an earlier life
    nsenter -t "$head_pid" -n ip link add "v$1" type veth peer name eth0 netns "$node_pid" &&
        nsenter -t "$head_pid" -n ip link set "v$1" master br0 up &&
        nsenter -t "$node_pid" -n ip addr add "$2/24" dev eth0 &&
        nsenter -t "$node_pid" -n ip link set eth0 up
}
in_node() { # NODE CMD ...: run a command on the node, with a daemon's environment
    local name=$1 flags=()
    shift
    if [[ $MODE == netns ]]; then
        alive "$name" || return 1
        flags=(nsenter -t "$ID_PID" -n -u -m -r)
        [[ $name == head ]] || flags+=(-p)
    fi
    "${CLEAN[@]}" DEVCLUSTER_NODE="$DIR:$name" "${flags[@]}" env -C / "$@"
}

shared_processes() { # those of --shared-cmd that live on, e.g. a FUSE file system
    local environ files=()
    mapfile -t files < <(grep -lzxF "DEVCLUSTER_SHARED=$DIR" /proc/[0-9]*/environ 2>/dev/null)
    for environ in "${files[@]}"; do
        environ=${environ#/proc/}
        echo "${environ%/environ}"
    done
}

# ---- daemons
start_munge() {
    ! alive munged || return 0
    [[ -s $RUN/munge.key ]] || (umask 077 && head -c 128 /dev/urandom >"$RUN/munge.key")
    rm -f "$RUN/munged.pid"
    daemon munged in_node head munged --force --key-file="$RUN/munge.key" --socket="$RUN/munge.socket" \
        --pid-file="$RUN/munged.pid" --log-file="$DIR/log/munged.log" --seed-file="$RUN/munge.seed" &&
        remember_pidfile munged
}
start_controller() { # until it answers
    local i flags=()
    if ! alive slurmctld; then
        rm -f "$RUN/slurmctld.pid"
        # killed before it wrote this file for the first time, which takes minutes, a newer Slurm refuses to start
        [[ $ACCOUNTING == no || ! -d $DIR/state || -e $DIR/state/assoc_usage ]] || flags=(-i)
        daemon slurmctld in_node head slurmctld "${flags[@]}" && remember_pidfile slurmctld || return 1
    fi
    for ((i = 0; i < 200; i++)); do
        ! on_head timeout 5 sinfo -h >/dev/null 2>&1 || return 0
        alive slurmctld || return 1
        sleep 0.05
    done
    return 1
}
node_up() { # NODE: its slurmd runs
    if [[ $MODE == netns ]]; then slurmd_signal 0 "$1"; else alive "slurmd.$1"; fi
}
# shellcheck disable=SC2016  # expanded on the node
slurmd_signal() { # SIGNAL NODE, with namespaces: pids are the node's own, and /proc tells who it is
    alive "$2" && in_node "$2" sh -c \
        'read -r p <"$2" && read -r c <"/proc/$p/comm" && [ "$c" = slurmd ] && kill -s "$1" "$p"' \
        sh "$1" "$RUN/slurmd.$2.pid" 2>/dev/null
}
start_node() { # NODE
    ! node_up "$1" || return 0
    mkdir -p "$DIR/spool/$1"
    [[ $MODE == loopback ]] || alive "$1" || make_namespaces "$1" "$NET.${1#n}" || return 1
    rm -f "$RUN/slurmd.$1.pid"
    daemon "slurmd.$1" in_node "$1" slurmd -N "$1" || return 1
    [[ $MODE == netns ]] || remember_pidfile "slurmd.$1"
}
power_off() { # NODE: everything of it dies at once
    local pids empty=0
    if [[ $MODE == netns ]]; then
        end "$1" KILL
        ! alive head || nsenter -t "$ID_PID" -n ip link del "v$1" 2>/dev/null || true
        return 0
    fi
    end "slurmd.$1" KILL
    # What is just being started shows no environment, but its parent: that is stopped first, so that it starts nobody
    # more and still has its children when these are listed. Orphans in that state are seen by the second look.
    for _ in {1..50}; do
        pids=$(node_processes "$1")
        if [[ -z $pids ]]; then
            ((++empty < 2)) || return 0
        else
            empty=0
            # shellcheck disable=SC2086  # a list of pids
            pids=$(descendants $pids)
            # shellcheck disable=SC2086
            kill -s STOP $pids 2>/dev/null || true
            # shellcheck disable=SC2046,SC2086
            kill -s KILL $(descendants $pids) 2>/dev/null || true
        fi
        sleep 0.05
    done
}
node_processes() { # NODE, without namespaces: its step managers and tasks, known by their environment
    local environ files=()
    mapfile -t files < <(
        grep -lzxF "DEVCLUSTER_NODE=$DIR:$1" /proc/[0-9]*/environ 2>/dev/null
        mapfile -t files < <(grep -lzxF "SLURM_CONF=$CONF" /proc/[0-9]*/environ 2>/dev/null)
        [[ ${#files[@]} -eq 0 ]] || grep -lzxF "SLURMD_NODENAME=$1" "${files[@]}" 2>/dev/null
    )
    for environ in "${files[@]}"; do
        environ=${environ#/proc/}
        echo "${environ%/environ}"
    done
}
start_accounting() {
    local db=$DIR/mysql i
    if ! alive mariadbd; then
        [[ -d $db/mysql ]] || mariadb-install-db --no-defaults --user="$(id -un)" --datadir="$db" --skip-test-db \
            --auth-root-authentication-method=normal >"$DIR/log/mariadb-install.out" 2>&1 || return 1
        "${CLEAN[@]}" setsid mariadbd --no-defaults --user="$(id -un)" --datadir="$db" --socket="$RUN/mysql.socket" \
            --pid-file="$RUN/mariadbd.pid" --skip-networking --innodb-buffer-pool-size=64M \
            --innodb-lock-wait-timeout=900 >"$DIR/log/mariadbd.log" 2>&1 </dev/null 9>&- &
        remember mariadbd "$!" || return 1
    fi
    for ((i = 0; i < 300; i++)); do
        ! mariadb --no-defaults -u root -S "$RUN/mysql.socket" -e '' 2>/dev/null || break
        sleep 0.1
    done
    mariadb --no-defaults -u root -S "$RUN/mysql.socket" -e "
        create user if not exists slurm@localhost identified by 'slurm';
        create database if not exists slurm_acct_db; grant all on slurm_acct_db.* to slurm@localhost" || return 1
    if ! alive slurmdbd; then
        rm -f "$RUN/slurmdbd.pid"
        daemon slurmdbd in_node head env MYSQL_UNIX_PORT="$RUN/mysql.socket" slurmdbd &&
            remember_pidfile slurmdbd || return 1
    fi
    for ((i = 0; i < 300; i++)); do
        ! on_head timeout 10 sacctmgr -n list cluster >/dev/null 2>&1 || return 0
        sleep 0.1
    done
    return 1
}
