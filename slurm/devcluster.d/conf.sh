# shellcheck shell=bash
# Part of slurm/devcluster: installing Slurm, the settings of a cluster, its configuration files.

# shellcheck disable=SC2034  # SHARED_CMD is used in nodes.sh

# ---- settings: the defaults, `up`'s options, then kept in RUN/cluster.env
N=6 GPU_NODES="" GPUS=8 CPUS=16 MEM=64000 SLURMD_TIMEOUT=20 CRED_EXPIRE=10 KILL_WAIT=15 GRACE=0
ACCOUNTING=no MODE=netns SHARED_CMD="" SUITE="" CGROUP="" EXTRA=""

number() { # OPTION VALUE LEAST MOST
    if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3 || 10#$2 > $4)); then
        die 2 "$1 takes a number from $3 to $4, not '$2'"
    fi
}
parse_up() { # up's arguments -> settings
    while [[ $# -gt 0 ]]; do
        if [[ $1 == --*=* ]]; then set -- "${1%%=*}" "${1#*=}" "${@:2}"; fi
        case $1 in
        --accounting) ACCOUNTING=yes ;;
        --cgroup) CGROUP=$(cgroup_version) || exit ;;
        --loopback) MODE=loopback ;;
        --*)
            [[ $# -ge 2 ]] || die 2 "$1 needs a value"
            take "$1" "$2"
            shift
            ;;
        *)
            number "the number of nodes" "$1" 1 200
            N=$((10#$1))
            ;;
        esac
        shift
    done
    : "${GPU_NODES:=$(((2 * N + 1) / 3))}"
    ((GPU_NODES <= N)) || die 2 "--gpu-nodes $GPU_NODES is more than the $N nodes"
}
take() { # OPTION VALUE
    case $1 in
    --gpu-nodes) number "$1" "$2" 1 200 && GPU_NODES=$((10#$2)) ;;
    --gpus) number "$1" "$2" 1 64 && GPUS=$((10#$2)) ;;
    --cpus) number "$1" "$2" 2 1024 && CPUS=$((10#$2 / 2 * 2)) ;; # two sockets
    --mem) number "$1" "$2" 1000 100000000 && MEM=$((10#$2)) ;;
    --slurmd-timeout) number "$1" "$2" 5 3600 && SLURMD_TIMEOUT=$((10#$2)) ;;
    --cred-expire) number "$1" "$2" 5 3600 && CRED_EXPIRE=$((10#$2)) ;;
    --kill-wait) number "$1" "$2" 1 3600 && KILL_WAIT=$((10#$2)) ;;
    --grace) number "$1" "$2" 0 3600 && GRACE=$((10#$2)) ;;
    --suite)
        [[ $2 =~ ^[a-z]+$ ]] || die 2 "--suite takes the name of a Debian suite, not '$2'"
        SUITE=$2
        ;;
    --shared-cmd) SHARED_CMD=$2 ;;
    --conf) EXTRA+=$2$'\n' ;;
    *) die 2 "up has no option $1; see --help" ;;
    esac
}
check_dir() { # a folder that Slurm can live in, and of which `down --clean` may remove what `up` made
    DIR=$(readlink -m "$DIR")
    RUN=$DIR/run
    CONF=$DIR/etc/slurm.conf
    [[ $DIR =~ ^[A-Za-z0-9/._+@:-]+$ ]] ||
        die 2 "Slurm cannot keep state in '$DIR': use letters, digits and ._+@:- only (--dir)"
    ((${#DIR} <= 70)) || die 2 "the path $DIR is too long for Slurm's sockets (70 bytes): choose another with --dir"
    mkdir -p "$DIR" || die "cannot make $DIR: choose another folder with --dir"
    [[ -O $DIR ]] || die "$DIR belongs to another user: choose another folder with --dir"
    [[ -e $DIR/.devcluster || -e $RUN/cluster.env || -z $(ls -A "$DIR") ]] ||
        die 2 "$DIR holds other files and no cluster: choose a new or empty folder with --dir"
    : >>"$DIR/.devcluster"
}
derive() { # network and ports come from the folder's name: two clusters never share them
    local hash _
    hash=$(printf '%s' "$DIR" | cksum)
    hash=${hash%% *}
    NET=10.$((64 + hash % 128)).$((hash / 128 % 250))
    PORT=$((10000 + hash / 32000 % 80 * 256))
    [[ $MODE == loopback ]] || return 0
    for _ in {1..80}; do # all nodes share this machine's ports: on to the next block while one is in use
        ! ports_used "$PORT" $((PORT + N + 2)) || PORT=$((PORT + 256 < 30480 ? PORT + 256 : 10000))
    done
    ! ports_used "$PORT" $((PORT + N + 2)) || die "no $((N + 3)) free ports in a row between 10000 and 30480"
}
ports_used() { # FIRST LAST: a socket is bound to one of these TCP ports
    local address port
    while read -r _ address _; do
        [[ $address == *:* ]] || continue
        port=$((16#${address##*:}))
        ((port < $1 || port > $2)) || return 0
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    return 1
}
keep_settings() {
    local name
    for name in DIR CONF N GPU_NODES GPUS CPUS MEM SLURMD_TIMEOUT CRED_EXPIRE KILL_WAIT GRACE ACCOUNTING MODE NET PORT \
        SHARED_CMD SUITE ROOT CGROUP EXTRA; do
        printf '%s=%q\n' "$name" "${!name}"
    done >"$RUN/cluster.env.new"
    mv "$RUN/cluster.env.new" "$RUN/cluster.env"
}

# ---- what must be there
PATH=$PATH:/usr/sbin:/sbin
install() { # TOOL:PACKAGE ...: install the packages of the tools that are missing
    local pair packages=() log=$DIR/log/apt.log
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null || packages+=("${pair#*:}")
    done
    [[ ${#packages[@]} -gt 0 ]] || return 0
    command -v apt-get >/dev/null || die 4 "missing: ${packages[*]} (Debian's names). Without apt-get nothing can be" \
        "installed from here: install Slurm and munge by this system's means, then run up again"
    [[ $UID == 0 ]] ||
        die 4 "missing: ${packages[*]}. Run up once as root, or:" \
            "sudo apt-get install --no-install-recommends ${packages[*]}"
    say "installing ${packages[*]} with apt"
    local _
    for _ in 1 2 3; do # another apt may be at work
        # RUNLEVEL=1: packages start no daemons (with systemd Debian's Slurm does not start without /etc/slurm)
        if RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive timeout 600 bash -c 'apt-get update -qq
            apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"' apt "${packages[@]}" \
            >"$log" 2>&1 </dev/null; then
            hash -r
            return 0
        fi
        sleep 3
    done
    tail -n 5 "$log" >&2
    die "apt could not install ${packages[*]}; all that it said is in $log"
}
choose_mode() { # namespaces where they can be had
    [[ $MODE == netns ]] || return 0
    local why=""
    if [[ $UID != 0 ]]; then
        why="not root"
    elif ! timeout 10 unshare -n -u -m -p --fork --mount-proc true 2>/dev/null; then
        why="this root may not make namespaces (a container without CAP_SYS_ADMIN?)"
    else
        install ip:iproute2
        timeout 10 unshare -n sh -c 'ip link add b0 type bridge && ip link add v0 type veth peer name v1' 2>/dev/null ||
            why="this kernel has no bridge or veth"
    fi
    [[ -n $why ]] || return 0
    [[ -z $SUITE ]] || die 4 "--suite needs nodes with namespaces of their own: $why"
    MODE=loopback
    say "no namespaces: $why. All nodes share this machine's name, ports and processes; cut and join do not work"
}
install_slurm() {
    prepare_root
    [[ -n $ROOT ]] || install slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge
    [[ $ACCOUNTING == no ]] || install mariadbd:mariadb-server-core mariadb:mariadb-client-core
    [[ $ACCOUNTING == no || -n $ROOT ]] || install slurmdbd:slurmdbd
}

# ---- configuration files
write_conf() {
    local i host=head addr=$NET.254 cgroup=cgroup/v1 version me
    me=$(id -un)
    mkdir -p "$DIR"/{etc,run,log,state,spool,dev}
    chmod 755 "$DIR" "$DIR"/{etc,run,log,spool,dev}
    # a fake GPU must be a character device (a plain file: the right count, but no CUDA_VISIBLE_DEVICES)
    for ((i = 0; i < GPUS; i++)); do
        if [[ -n $CGROUP ]]; then # each its own: what a job did not ask for is denied to it
            rm -f "$DIR/dev/nvidia$i"
            mknod "$DIR/dev/nvidia$i" c 195 "$i" || die "--cgroup needs devices of its own, which cannot be made here"
        else
            ln -sfn /dev/null "$DIR/dev/nvidia$i"
        fi
    done
    {
        printf '127.0.0.1 localhost\n::1 localhost\n%s head\n' "$addr"
        for ((i = 1; i <= N; i++)); do echo "$NET.$i n$i"; done
    } >"$DIR/etc/hosts"
    if [[ $MODE == loopback ]]; then
        host=$(uname -n)
        host=${host%%.*} addr=127.0.0.1
    fi
    echo "NodeName=n[1-$GPU_NODES] Name=gpu File=$DIR/dev/nvidia[0-$((GPUS - 1))]" >"$DIR/etc/gres.conf"
    # read even though nothing here uses cgroups; only a newer Slurm can be told so
    version=$(root_slurm slurmctld -V | grep -oE '[0-9]+\.[0-9]+' | head -n 1)
    if ((${version%.*} >= 23)); then cgroup=disabled; fi
    if [[ -n $CGROUP ]]; then
        printf '%s\n' "CgroupPlugin=cgroup/$CGROUP" IgnoreSystemd=yes ConstrainDevices=yes >"$DIR/etc/cgroup.conf"
        ((${version%.*} >= 23)) || sed -i /IgnoreSystemd/d "$DIR/etc/cgroup.conf"
    else
        echo "CgroupPlugin=$cgroup" >"$DIR/etc/cgroup.conf"
    fi
    {
        slurm_conf "$host" "$addr" "$me"
        [[ $ACCOUNTING == no ]] || printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd \
            "AccountingStorageHost=$addr" "AccountingStoragePort=$((PORT + 1))" \
            "AccountingStoragePass=$RUN/munge.socket" AccountingStorageTRES=gres/gpu
        node_lines "$host" "Boards=1 Sockets=2 CoresPerSocket=$((CPUS / 2)) ThreadsPerCore=1 CPUs=$CPUS RealMemory=$MEM"
        partition_lines
        printf '%s' "$EXTRA"
    } >"$CONF"
    [[ $ACCOUNTING == no ]] || dbd_conf "$host" "$addr" "$me"
}
cgroup_version() { # v1 or v2, as this machine has it; Slurm takes no mixture for v2
    local version=v2 folder=/sys/fs/cgroup
    if grep -qvE '^0::' /proc/self/cgroup; then version=v1 folder=/sys/fs/cgroup/devices; fi
    # a container's /sys may have no cgroups mounted, or nobody may write there
    mkdir "$folder/devcluster.$$" 2>/dev/null || die "--cgroup needs control groups, which cannot be made here ($folder)"
    rmdir "$folder/devcluster.$$"
    echo "$version"
}
slurm_conf() { # HOST ADDRESS USER
    local proctrack=linuxproc task=none
    if [[ -n $CGROUP ]]; then proctrack=cgroup task=cgroup; fi
    cat <<X
ClusterName=primehpcdev
SlurmctldHost=$1($2)
SlurmctldPort=$PORT
AuthType=auth/munge
AuthInfo=socket=$RUN/munge.socket,cred_expire=$CRED_EXPIRE
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=$3
SlurmdUser=$3
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/$proctrack
TaskPlugin=task/$task
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=$SLURMD_TIMEOUT
KillWait=$KILL_WAIT
MinJobAge=3600
JobRequeue=1
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
GresTypes=gpu
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.txt
X
}
node_lines() { # HOST SHAPE: CPU-only nodes have no Gres at all
    local i address gres
    for ((i = 1; i <= N; i++)); do
        address="NodeHostname=$1 NodeAddr=127.0.0.1 Port=$((PORT + 2 + i))" gres=""
        [[ $MODE == loopback ]] || address="NodeHostname=n$i NodeAddr=$NET.$i Port=$((PORT + 2))"
        ((i > GPU_NODES)) || gres="Gres=gpu:$GPUS"
        echo "NodeName=n$i $address $2 State=UNKNOWN $gres"
    done
}
partition_lines() {
    local gpu="Nodes=n[1-$GPU_NODES]" rest="MaxTime=INFINITE DefMemPerCPU=100 State=UP"
    echo "PartitionName=gpu $gpu Default=YES PriorityTier=1 PreemptMode=OFF $rest"
    ((GPU_NODES == N)) || echo "PartitionName=cpu Nodes=n[$((GPU_NODES + 1))-$N] PriorityTier=1 PreemptMode=OFF $rest"
    echo "PartitionName=all Nodes=n[1-$N] PriorityTier=1 PreemptMode=OFF $rest"
    echo "PartitionName=scavenge $gpu PriorityTier=1 PreemptMode=REQUEUE GraceTime=$GRACE $rest"
    echo "PartitionName=scavcancel $gpu PriorityTier=1 PreemptMode=CANCEL GraceTime=$GRACE $rest"
    echo "PartitionName=high $gpu PriorityTier=10 PreemptMode=OFF $rest"
}
dbd_conf() { # HOST ADDRESS USER; slurmdbd refuses one that others can read
    rm -f "$DIR/etc/slurmdbd.conf"
    (
        umask 077
        cat >"$DIR/etc/slurmdbd.conf" <<X
AuthType=auth/munge
AuthInfo=socket=$RUN/munge.socket
DbdHost=$1
DbdAddr=$2
DbdPort=$((PORT + 1))
SlurmUser=$3
LogFile=$DIR/log/slurmdbd.log
PidFile=$RUN/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
X
    )
}
