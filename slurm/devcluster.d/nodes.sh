# shellcheck shell=bash
# Part of slurm/devcluster: namespaces, daemons, and ending exactly what was started.

# ---- processes
remember() { # NAME PID: keep who it is
    start_time "$2" || return 1
    echo "$2 $START" >"$RUN/$1.id"
}
remember_pidfile() { # NAME FILE: the same for a daemon that writes its own pid file
    local _ pid
    for _ in {1..100}; do
        { read -r pid <"$2"; } 2>/dev/null && remember "$1" "$pid" && return 0
        sleep 0.05
    done
    return 1
}
end() { # NAME [SIGNAL [SECONDS]]: end one process of ours; SIGKILL after SECONDS (10)
    local signal=${2:-TERM} i
    if alive "$1"; then
        kill -s "$signal" "$ID_PID" 2>/dev/null || true
        for ((i = 0; i < ${3:-10} * 20; i++)); do
            alive "$1" || break
            sleep 0.05
        done
        ! alive "$1" || kill -s KILL "$ID_PID" 2>/dev/null || true
    fi
    rm -f "$RUN/$1.id"
}
# daemons get a small environment: what `up` was called with must not leak into jobs; fd 9 is this script's lock
CLEAN=(env -i PATH="$PATH" HOME="${HOME:-/}" LANG="${LANG:-C.UTF-8}" SLURM_CONF="$CONF")
clean() { "${CLEAN[@]}" "$@" 9>&-; }
daemon() { # LOG CMD ...: start a daemon that goes to the background by itself
    local log=$DIR/log/$1.out
    shift
    "$@" >"$log" 2>&1 </dev/null || {
        tail -n 5 "$log" >&2
        return 1
    }
}
descendants() { # PID ...: they and all their descendants
    local -A parent=()
    local pid stat grew=1 wanted=" $* "
    for stat in /proc/[0-9]*/stat; do
        { read -r stat <"$stat"; } 2>/dev/null || continue
        pid=${stat%% *} stat=${stat##*) }
        stat=${stat#* }
        parent[$pid]=${stat%% *}
    done
    while ((grew)); do
        grew=0
        for pid in "${!parent[@]}"; do
            if [[ $wanted == *" ${parent[$pid]} "* && $wanted != *" $pid "* ]]; then wanted+="$pid " grew=1; fi
        done
    done
    echo "$wanted"
}

# ---- namespaces: a holder process a node (holder.sh)
make_namespaces() { # NAME ADDRESS
    local name=$1 pid i flags=(-n -u -m --propagation slave)
    ! alive "$name" || return 0
    [[ $name == head ]] || flags+=(-p --fork --kill-child --mount-proc)
    rm -f "$RUN/$name.ready"
    "${CLEAN[@]}" setsid unshare "${flags[@]}" bash "$HERE/devcluster.d/holder.sh" "$name" "$DIR" "$2" \
        >"$DIR/log/ns.$name.out" 2>&1 </dev/null 9>&- &
    pid=$!
    for ((i = 0; i < 200; i++)); do
        [[ ! -e $RUN/$name.ready ]] || break
        sleep 0.02
    done
    [[ -e $RUN/$name.ready ]] || {
        tail -n 3 "$DIR/log/ns.$name.out" >&2
        return 1
    }
    rm -f "$RUN/$name.ready"
    if [[ $name == head ]]; then
        remember head "$pid"
        return
    fi
    remember "$name" "$(holder_of "$pid")" || return 1
    plug "$name" "$2"
}
holder_of() { # PID of unshare -> its only child
    local stat pid
    for stat in /proc/[0-9]*/stat; do
        { read -r stat <"$stat"; } 2>/dev/null || continue
        pid=${stat%% *} stat=${stat##*) }
        stat=${stat#* }
        if [[ ${stat%% *} == "$1" ]]; then echo "$pid" && return; fi
    done
    return 1
}
plug() { # NODE ADDRESS: a cable from the node to the head's bridge
    local node_pid head_pid
    alive head && head_pid=$ID_PID
    alive "$1" && node_pid=$ID_PID
    nsenter -t "$head_pid" -n ip link del "v$1" 2>/dev/null || true
    nsenter -t "$head_pid" -n ip link add "v$1" type veth peer name eth0 netns "$node_pid" || return 1
    nsenter -t "$head_pid" -n ip link set "v$1" master br0 up
    nsenter -t "$node_pid" -n ip addr add "$2/24" dev eth0
    nsenter -t "$node_pid" -n ip link set eth0 up
}
in_node() { # NODE CMD ...: run a command on the node
    local name=$1 flags=()
    shift
    if [[ $MODE == netns ]]; then
        alive "$name" || return 1
        flags=(nsenter -t "$ID_PID" -n -u -m)
        [[ $name == head ]] || flags+=(-p)
    fi
    clean "${flags[@]}" env -C / "$@"
}

# ---- daemons
start_munge() {
    ! alive munged || return 0
    [[ -s $RUN/munge.key ]] || (umask 077 && head -c 128 /dev/urandom >"$RUN/munge.key")
    rm -f "$RUN/munged.pid"
    daemon munged clean munged --force --key-file="$RUN/munge.key" --socket="$RUN/munge.socket" \
        --pid-file="$RUN/munged.pid" --log-file="$DIR/log/munged.log" --seed-file="$RUN/munge.seed" &&
        remember_pidfile munged "$RUN/munged.pid"
}
start_controller() {
    ! alive slurmctld || return 0
    rm -f "$RUN/slurmctld.pid"
    daemon slurmctld in_node head slurmctld && remember_pidfile slurmctld "$RUN/slurmctld.pid"
}
node_up() { # NODE: its slurmd runs
    if [[ $MODE == netns ]]; then slurmd_signal 0 "$1"; else alive "slurmd.$1"; fi
}
slurmd_signal() { # SIGNAL NODE, with namespaces: pids are the node's own; so is /proc, read for who it is
    alive "$2" && in_node "$2" sh -c \
        'read -r p <"$2" && read -r c <"/proc/$p/comm" && [ "$c" = slurmd ] && kill -s "$1" "$p"' \
        sh "$1" "$RUN/slurmd.$2.pid" 2>/dev/null
}
start_node() { # NODE
    ! node_up "$1" || return 0
    mkdir -p "$DIR/spool/$1"
    if [[ $MODE == netns ]] && ! alive "$1"; then
        make_namespaces "$1" "$NET.${1#n}" || return 1
        [[ -z $SHARED_CMD ]] || daemon "shared.$1" in_node "$1" sh -c "${SHARED_CMD//%n/$1}" || return 1
    elif [[ $MODE == loopback && -n $SHARED_CMD ]]; then
        daemon "shared.$1" in_node "$1" sh -c "${SHARED_CMD//%n/$1}" || return 1
    fi
    rm -f "$RUN/slurmd.$1.pid"
    daemon "slurmd.$1" in_node "$1" slurmd -N "$1" || return 1
    [[ $MODE == netns ]] || remember_pidfile "slurmd.$1" "$RUN/slurmd.$1.pid"
}
power_off() { # NODE: everything of it dies at once
    local pids
    if [[ $MODE == netns ]]; then
        end "$1" KILL
        ! alive head || nsenter -t "$ID_PID" -n ip link del "v$1" 2>/dev/null || true
        return
    fi
    end "slurmd.$1" KILL
    pids=$(node_processes "$1")
    # shellcheck disable=SC2086  # a list of pids
    [[ -z $pids ]] || kill -s KILL $(descendants $pids) 2>/dev/null || true
}
node_processes() { # NODE, without namespaces: its step managers and tasks, by their environment
    local environ pid
    for environ in /proc/[0-9]*/environ; do
        pid=${environ#/proc/} pid=${pid%/environ}
        tr '\0' '\n' <"$environ" 2>/dev/null | awk -v c="SLURM_CONF=$CONF" -v n="SLURMD_NODENAME=$1" \
            '$0 == c { a = 1 } $0 == n { b = 1 } END { exit !(a && b) }' && echo "$pid"
    done 2>/dev/null || true
    ss -xlpH 2>/dev/null | grep -F " $DIR/spool/$1/" | grep -o 'pid=[0-9]*' | cut -d= -f2 || true
}
start_accounting() {
    local db=$DIR/mysql i
    if ! alive mariadbd; then
        [[ -d $db/mysql ]] || mariadb-install-db --no-defaults --user="$(id -un)" --datadir="$db" --skip-test-db \
            --auth-root-authentication-method=normal >"$DIR/log/mariadb-install.out" 2>&1 || return 1
        "${CLEAN[@]}" setsid mariadbd --no-defaults --user="$(id -un)" --datadir="$db" --socket="$RUN/mysql.socket" \
            --pid-file="$RUN/mariadbd.pid" --skip-networking --innodb-buffer-pool-size=64M \
            --innodb-lock-wait-timeout=900 >"$DIR/log/mariadbd.log" 2>&1 </dev/null 9>&- &
        remember mariadbd "$!"
    fi
    for ((i = 0; i < 300; i++)); do
        ! mariadb-admin --no-defaults -S "$RUN/mysql.socket" ping >/dev/null 2>&1 || break
        sleep 0.1
    done
    mariadb --no-defaults -u root -S "$RUN/mysql.socket" -e "create user if not exists slurm@localhost identified by 'slurm';
        create database if not exists slurm_acct_db; grant all on slurm_acct_db.* to slurm@localhost" || return 1
    if ! alive slurmdbd; then
        rm -f "$RUN/slurmdbd.pid"
        daemon slurmdbd in_node head env MYSQL_UNIX_PORT="$RUN/mysql.socket" slurmdbd &&
            remember_pidfile slurmdbd "$RUN/slurmdbd.pid" || return 1
    fi
    for ((i = 0; i < 100; i++)); do
        ! on_head sacctmgr -n list cluster >/dev/null 2>&1 || return 0
        sleep 0.1
    done
    return 1
}
