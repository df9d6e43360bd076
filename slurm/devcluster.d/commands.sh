# shellcheck shell=bash
# Part of slurm/devcluster: up, down, status and the drills.

nodes() { local i && for ((i = 1; i <= N; i++)); do echo "n$i"; done; }
up() {
    local node deadline begun=() running=no
    check_dir
    if [[ -r $RUN/cluster.env ]]; then
        # shellcheck source=/dev/null
        (source "$RUN/cluster.env" && something_runs) && running=yes
    fi
    if [[ $running == yes ]]; then
        # shellcheck source=/dev/null
        source "$RUN/cluster.env"
    else
        parse_up "$@"
        mkdir -p "$RUN" "$DIR/log"
        choose_mode
        install_slurm
        derive
        write_conf
        keep_settings
    fi
    trap 'say "not started; ending what was"; end_all' EXIT
    alive munged || { start_munge && begun+=(munged); } || die "munged did not start; see $DIR/log/munged.log"
    if [[ $MODE == netns ]] && ! alive head; then
        make_namespaces head "$NET.254" || die "the head node's namespaces could not be made"
    fi
    if [[ $ACCOUNTING == yes ]] && ! alive slurmdbd; then
        start_accounting || die "slurmdbd did not come up; see $DIR/log/slurmdbd.log and mariadbd.log"
        begun+=(slurmdbd)
    fi
    alive slurmctld || { start_controller && begun+=(slurmctld); } ||
        die "slurmctld did not start; see $DIR/log/slurmctld.log"
    for node in $(nodes); do
        node_up "$node" || { start_node "$node" && begun+=("$node"); } ||
            die "$node did not start; see $DIR/log/slurmd.$node.log"
    done
    trap - EXIT
    if [[ ${#begun[@]} -eq 0 ]]; then
        say "is up already with $N nodes in $DIR (\`down\` first to change it)"
        return
    fi
    [[ $running == no ]] || say "was running; started what was missing: ${begun[*]}"
    deadline=$((SECONDS + 30))
    until [[ -z $(on_head sinfo -h -N -p all -t unknown,down,no_respond -o %N 2>&1) ]]; do
        ((SECONDS < deadline)) || die "not every node came up in 30 s: \`slurm/devcluster status\`, logs in $DIR/log"
        sleep 0.1
    done
    on_head sinfo -o '%10P %5D %8t %10N %4c %8m %G' >&2
    say "up. Next: slurm/devcluster x sbatch --wrap hostname"
}
check_dir() { # Slurm's files hold no spaces, and a Unix socket's path is at most 107 bytes
    [[ $DIR =~ ^[A-Za-z0-9/._+@:-]+$ ]] || die 2 "Slurm cannot have state in '$DIR': use letters, digits and ._+@:- (--dir)"
    ((${#DIR} <= 70)) || die 2 "the path $DIR is too long for sockets (70 bytes): choose another with --dir"
}
something_runs() {
    local id name
    for id in "$RUN"/*.id; do
        name=${id##*/}
        ! alive "${name%.id}" || return 0
    done
    return 1
}
end_all() {
    local node name
    [[ ! -r $RUN/cluster.env ]] || for node in $(nodes); do power_off "$node"; done
    for name in slurmctld slurmdbd mariadbd munged; do end "$name"; done
    [[ $MODE != netns ]] || end_head
    rm -f "$RUN"/*.id "$RUN"/*.pid "$RUN"/*.socket*
}
end_head() { # commands that still run on the head keep its namespaces: they end with it
    local link ns pid own=" $$ $PPID $BASHPID " names=()
    if ! alive head; then return; fi
    ns=$(readlink "/proc/$ID_PID/ns/net")
    if [[ $ns != "$(readlink /proc/self/ns/net)" ]]; then
        for link in /proc/[0-9]*/ns/net; do
            pid=${link#/proc/} pid=${pid%/ns/net}
            [[ $pid != "$ID_PID" && $own != *" $pid "* && $(readlink "$link" 2>/dev/null) == "$ns" ]] || continue
            names+=("$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)")
            kill -s TERM "$pid" 2>/dev/null || true
        done
        [[ ${#names[@]} -eq 0 ]] || say "ended on the head node: $(IFS=';' && echo "${names[*]}")"
    fi
    end head KILL
}
down() { # [--clean]
    [[ ${1:-} == "" || ${1:-} == --clean ]] || die 2 "down takes --clean only, not $1"
    if [[ -r $RUN/cluster.env ]]; then
        # shellcheck source=/dev/null
        source "$RUN/cluster.env"
        if something_runs; then
            ! alive slurmctld || cancel_all
            end_all
            say "down ($DIR)"
        else
            end_all
            say "was not running ($DIR)"
        fi
    else
        say "no cluster in $DIR"
    fi
    if [[ ${1:-} == --clean && -f $CONF ]]; then
        rm -rf "$DIR"/{etc,run,log,state,spool,dev,mysql,shared}
        rm -f "$DIR/lock" && rmdir "$DIR" 2>/dev/null || say "kept other files in $DIR"
    fi
}
cancel_all() {
    local ids
    ids=$(on_head timeout 5 squeue -h -t PENDING,RUNNING,SUSPENDED,COMPLETING -o %A 2>/dev/null | sort -u) || return 0
    # shellcheck disable=SC2086  # a list of ids
    [[ -z $ids ]] || on_head timeout 10 scancel -f $ids 2>/dev/null || true
}
status() {
    local id name
    for id in "$RUN"/*.id; do
        name=${id##*/} name=${name%.id}
        if alive "$name"; then echo "$name: running, pid $ID_PID"; else echo "$name: not running"; fi
    done
    on_head timeout 15 sinfo -N -o '%6N %10P %12T %4c %8m %10G %E' || die 3 "slurmctld does not answer"
    on_head timeout 15 squeue -o '%8i %10P %16j %8u %10T %10M %4D %R'
}

# ---- drills
need_node() { [[ ${1:-} =~ ^n[0-9]+$ ]] && ((10#${1#n} >= 1 && 10#${1#n} <= N)) || die 2 "which node, n1 to n$N? (not '${1:-}')"; }
need_netns() { [[ $MODE == netns ]] || die 2 "$1 works only where the nodes have network namespaces (root, without --loopback)"; }
cable() { # NODE up|down
    need_netns cut/join
    alive "$1" || die "$1 is powered off"
    alive head && nsenter -t "$ID_PID" -n ip link set "v$1" "$2"
}
preempt() { # [SECONDS [NODES]]
    local seconds=${1:-5} number=${2:-$GPU_NODES} id
    number "the seconds" "$seconds" 1 86400
    number "the number of nodes" "$number" 1 "$GPU_NODES"
    id=$(on_head sbatch --parsable -p high -J preempt -N "$number" --exclusive -t 60 -D / -o /dev/null \
        --wrap "sleep $seconds") || die 3 "the job was refused"
    say "job $id in high takes $number GPU node(s) for $seconds s"
    echo "$id"
}
drill() { # NAME [ARGUMENT ...]
    local name=$1 node=${2:-}
    case $name in
    kill-slurmd | power-off | power-on | cut | join | drain | undrain) need_node "$node" ;;
    esac
    case $name in
    kill-slurmd)
        if [[ $MODE == netns ]]; then slurmd_signal KILL "$node" || die "$node has no slurmd running"; else end "slurmd.$node" KILL; fi
        say "$node: slurmd killed, its tasks live on; down for Slurm after about $SLURMD_TIMEOUT s" ;;
    power-off) power_off "$node" && say "$node: powered off; down for Slurm after about $SLURMD_TIMEOUT s" ;;
    power-on) start_node "$node" && say "$node: slurmd runs" ;;
    cut) cable "$node" down && say "$node: cable pulled" ;;
    join) cable "$node" up && say "$node: cable plugged" ;;
    drain) on_head scontrol update NodeName="$node" State=DRAIN Reason="${*:3}" && say "$node: draining" ;;
    undrain) on_head scontrol update NodeName="$node" State=RESUME && say "$node: back" ;;
    kill-controller) end slurmctld KILL && say "slurmctld killed" ;;
    start-controller) start_controller && say "slurmctld runs" ;;
    restart-controller) end slurmctld && start_controller && say "slurmctld restarted" ;;
    preempt) preempt "${@:2}" ;;
    *) die 2 "unknown command $name; see --help" ;;
    esac
}
main() { # COMMAND [ARGUMENT ...]
    mkdir -p "$DIR" 2>/dev/null || die "cannot make $DIR: choose another folder with --dir"
    case $1 in
    up | down) ;;
    status) need_up && status && return ;;
    *) need_up ;;
    esac
    exec 9>"$DIR/lock"
    flock -w 60 9 || die "another devcluster command has been at work in $DIR for a minute"
    case $1 in
    up) up "${@:2}" ;;
    down) down "${@:2}" ;;
    *) drill "$@" ;;
    esac
}
