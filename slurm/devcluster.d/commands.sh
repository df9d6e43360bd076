# shellcheck shell=bash
# Part of slurm/devcluster: up, down, status and the drills.

# ---- up and down
up() { # [N] [OPTIONS]
    local begun=() running=no deadline
    if [[ -r $RUN/cluster.env ]] && something_runs; then running=yes; fi
    if [[ $running == yes ]]; then
        # shellcheck source=/dev/null
        source "$RUN/cluster.env"
    else
        parse_up "$@"
        mkdir -p "$RUN" "$DIR/log"
        choose_mode
        [[ $MODE == netns || -z $SHARED_CMD ]] || die 2 "--shared-cmd works only where the nodes have namespaces"
        install_slurm
        derive
        write_conf
        keep_settings
        trap 'set +e; say "not started: ending what was"; end_all' EXIT
    fi
    start_all
    trap - EXIT
    if [[ ${#begun[@]} -eq 0 ]]; then
        say "is up already with $N nodes in $DIR (to change it: down first)"
        return
    fi
    [[ $running == no ]] || say "was up with $N nodes in $DIR; started again: ${begun[*]}"
    deadline=$((SECONDS + 60))
    until [[ -z $(on_head sinfo -h -p all -t unknown,down,no_respond -o %N 2>&1) ]]; do
        ((SECONDS < deadline)) || die "not every node answers after a minute: see \`$AGAIN status\`, $DIR/log"
        sleep 0.1
    done
    [[ $running == yes ]] || say "up: $N nodes in $DIR. Next: $AGAIN x sbatch --wrap hostname"
}
start_all() { # all daemons that do not run; their names go to `begun`
    local node
    if [[ $MODE == netns ]] && ! alive head; then
        make_namespaces head "$NET.254" || die "the head node's namespaces could not be made"
        begun+=(head)
    fi
    if ! alive munged; then
        start_munge || die "munged did not start; see $DIR/log/munged.log"
        begun+=(munged)
    fi
    if [[ $ACCOUNTING == yes ]] && ! { alive mariadbd && alive slurmdbd; }; then
        start_accounting || die "accounting did not come up; see slurmdbd.log and mariadbd.log in $DIR/log"
        begun+=(slurmdbd)
    fi
    if ! alive slurmctld; then
        start_controller || die "slurmctld did not start; see $DIR/log/slurmctld.log"
        begun+=(slurmctld)
    fi
    for node in $(nodes); do
        ! node_up "$node" || continue
        start_node "$node" || die "$node did not start; see $DIR/log/slurmd.$node.log"
        begun+=("$node")
    done
}
nodes() { seq -f 'n%g' 1 "$N"; }
something_runs() {
    local id
    for id in "$RUN"/*.id; do
        id=${id##*/}
        ! alive "${id%.id}" || return 0
    done
    return 1
}
down() { # [--clean]
    [[ ${1:---clean} == --clean && $# -le 1 ]] || die 2 "down takes --clean only, not $*"
    if [[ -r $RUN/cluster.env ]] && something_runs; then
        # shellcheck source=/dev/null
        source "$RUN/cluster.env"
        if [[ ${1:-} == --clean ]]; then # nobody will read its state: not the seconds in which it would save that
            end slurmctld KILL
        elif alive slurmctld; then
            cancel_all
        fi
        end_all
        say "down ($DIR)"
    else
        say "no cluster runs in $DIR"
    fi
    if [[ ${1:-} == --clean ]]; then
        rm -rf --one-file-system "${DIR:?}"/{root,etc,run,log,state,spool,dev,mysql} "$DIR/.devcluster"
        rmdir "$DIR" 2>/dev/null || say "left alone: other files in $DIR"
    fi
}
cancel_all() {
    local ids
    ids=$(on_head timeout 10 squeue -h -t all -o '%A %T' 2>/dev/null |
        awk '/PENDING|RUNNING|SUSPENDED|CONFIGURING|HOLD/ { print $1 }' | sort -u) || return 0
    # shellcheck disable=SC2086  # a list of ids
    [[ -z $ids ]] || on_head timeout 10 scancel $ids 2>/dev/null || true
}
end_all() {
    local node name
    end slurmctld # first: it would wait for nodes that are gone
    for node in $(nodes); do power_off "$node"; done
    for name in slurmdbd mariadbd munged; do end "$name"; done
    [[ $MODE != netns ]] || end_head
    [[ -z $CGROUP ]] || find /sys/fs/cgroup -depth -type d -path '*/slurm_n[0-9]*' -exec rmdir {} + 2>/dev/null || true
    rm -f "$RUN"/*.id "$RUN"/*.pid "$RUN"/*.socket*
}
end_head() { # commands that still run on the head keep its namespaces: they end with it
    local i pids names
    alive head || return 0
    for ((i = 0; i < 40; i++)); do
        pids=$(on_head_pids)
        [[ -n $pids ]] || break
        # shellcheck disable=SC2086  # a list of pids
        if ((i == 0)); then
            names=$(ps -o args= -p "$(echo $pids | tr ' ' ,)" | cut -c1-60 | paste -sd ';')
            say "ended on the head node: $names"
            kill -s TERM $pids 2>/dev/null || true
        elif ((i == 20)); then
            kill -s KILL $pids 2>/dev/null || true
        fi
        sleep 0.1
    done
    end head KILL
}
on_head_pids() { # processes in the head's network, but for its holder and for this script and its ancestors
    local link pid ns own=" $BASHPID " PARENT
    alive head
    ns=$(readlink "/proc/$ID_PID/ns/net")
    parents
    for ((pid = BASHPID; pid > 1; pid = ${PARENT[pid]:-0})); do own+="$pid "; done
    for link in /proc/[0-9]*/ns/net; do
        pid=${link#/proc/}
        pid=${pid%/ns/net}
        [[ $pid == "$ID_PID" || $own == *" $pid "* || $(readlink "$link" 2>/dev/null) != "$ns" ]] || echo "$pid"
    done
}
status() {
    local id
    for id in "$RUN"/*.id; do
        id=${id##*/}
        id=${id%.id}
        if alive "$id"; then echo "$id: runs, pid $ID_PID"; else echo "$id: does not run"; fi
    done
    alive slurmctld || die 3 "slurmctld does not run: \`$AGAIN start-controller\`"
    on_head timeout 15 sinfo -N -p all -o '%6N %14T %4c %8m %10G %20E' || die 3 "slurmctld does not answer"
    on_head timeout 15 squeue -o '%10i %11P %16j %8u %11T %10M %5D %R'
}

# ---- drills
need_node() {
    if ! [[ ${1:-} =~ ^n[1-9][0-9]{0,2}$ ]] || ((${1#n} > N)); then die 2 "which node, n1 to n$N? Not '${1:-}'"; fi
}
cable() { # NODE up|down
    [[ $MODE == netns ]] || die 2 "cut and join work only where the nodes have namespaces (root, no --loopback)"
    alive "$1" || die "$1 is powered off"
    alive head
    nsenter -t "$ID_PID" -n ip link set "v$1" "$2"
}
shared() { # hang-shared|wake-shared
    local pids signal=STOP
    [[ $1 == hang-shared ]] || signal=CONT
    pids=$(shared_processes)
    [[ -n $pids ]] || die 2 "hang-shared needs a cluster whose --shared-cmd started a file system, e.g. bindfs"
    # shellcheck disable=SC2086  # a list of pids
    kill -s "$signal" $pids
    say "the shared file system $([[ $signal == STOP ]] && echo "hangs on every node" || echo "answers again")"
}
preempt() { # [SECONDS [NODES]]
    local seconds=${1:-5} number=${2:-$GPU_NODES} id
    number "the seconds" "$seconds" 1 86400
    number "the number of nodes" "$number" 1 "$GPU_NODES"
    id=$(on_head sbatch --parsable -p high -J preempt -N "$number" --exclusive -t 1440 -D / -o /dev/null \
        --wrap "exec sleep $seconds") || die 3 "the job was refused"
    say "job $id in high takes $number GPU node(s) for $seconds s (it waits for jobs that cannot be preempted)"
    echo "$id"
}
drill() { # NAME [ARGUMENT ...]
    local name=$1 node=${2:-} reason=${*:3}
    case $name in
    kill-slurmd | power-off | power-on | cut | join | drain | undrain) need_node "$node" ;;
    esac
    case $name in
    kill-slurmd)
        node_up "$node" || die "$node has no slurmd that runs"
        if [[ $MODE == netns ]]; then slurmd_signal KILL "$node"; else end "slurmd.$node" KILL; fi
        say "$node: slurmd killed, its tasks live on; DOWN for Slurm after about $SLURMD_TIMEOUT s"
        ;;
    power-off)
        power_off "$node"
        say "$node: powered off; DOWN for Slurm after about $SLURMD_TIMEOUT s"
        ;;
    power-on)
        start_node "$node" || die "$node did not start; see $DIR/log/slurmd.$node.log"
        say "$node: slurmd runs"
        ;;
    cut) cable "$node" down && say "$node: cable pulled" ;;
    join) cable "$node" up && say "$node: cable plugged" ;;
    drain)
        on_head scontrol update NodeName="$node" State=DRAIN Reason="${reason:-drill}" || die 3 "Slurm refused"
        say "$node: takes no new jobs"
        ;;
    undrain)
        on_head scontrol update NodeName="$node" State=RESUME || die 3 "Slurm refused"
        say "$node: takes jobs again"
        ;;
    kill-controller)
        alive slurmctld || die "slurmctld does not run"
        end slurmctld KILL
        say "slurmctld killed (it forgets what happened in its last 5 s)"
        ;;
    start-controller)
        start_controller || die "slurmctld did not start; see $DIR/log/slurmctld.log"
        say "slurmctld runs"
        ;;
    restart-controller)
        end slurmctld
        start_controller || die "slurmctld did not start; see $DIR/log/slurmctld.log"
        say "slurmctld restarted"
        ;;
    hang-shared | wake-shared) shared "$name" ;;
    preempt) preempt "${@:2}" ;;
    *) die 2 "unknown command $name; see --help" ;;
    esac
}

lock() { # one command at a time in DIR
    local _
    for _ in 1 2 3; do
        exec 9>"$DIR/.devcluster"
        flock -w 120 9 || die "another devcluster command has been at work in $DIR for two minutes"
        [[ ! $DIR/.devcluster -ef /proc/self/fd/9 ]] || return 0 # not removed by a `down --clean` in the meantime
        mkdir -p "$DIR"
    done
    die "$DIR comes and goes: is another up and down at work in it?"
}
main() { # COMMAND [ARGUMENT ...]
    case $1 in
    up)
        (parse_up "${@:2}") || exit
        check_dir
        lock
        up "${@:2}"
        ;;
    down)
        if [[ ! -d $DIR ]]; then
            say "no cluster in $DIR"
            return
        fi
        check_dir
        lock
        down "${@:2}"
        ;;
    status)
        need_up
        status
        ;;
    *)
        need_up
        lock
        drill "$@"
        ;;
    esac
}
