# shellcheck shell=bash
# Part of slurm/devcluster: installing Slurm, the settings of a cluster, its configuration files.

# ---- settings: the defaults, `up`'s options, then kept in RUN/cluster.env
N=6 GPU_NODES="" GPUS=8 CPUS=16 MEM=64000 SLURMD_TIMEOUT=20 CRED_EXPIRE=5 KILL_WAIT=15 GRACE=0
ACCOUNTING=no MODE=netns SHARED_CMD="" EXTRA=""

number() { # OPTION VALUE LEAST MOST
    [[ $2 =~ ^[0-9]{1,9}$ ]] && ((10#$2 >= $3 && 10#$2 <= $4)) || die 2 "$1 takes a number from $3 to $4, not '$2'"
}
parse_up() { # up's arguments -> settings
    while [[ $# -gt 0 ]]; do
        local option=$1 value=${2-}
        case $option in
        --*=*) value=${option#*=} option=${option%%=*} && set -- "$option" "$value" "${@:2}" ;;
        esac
        case $option in
        --accounting) ACCOUNTING=yes && shift && continue ;;
        --loopback) MODE=loopback && shift && continue ;;
        --*) [[ $# -ge 2 ]] || die 2 "$option needs a value" ;;
        esac
        case $option in
        --gpu-nodes) number "$option" "$value" 1 200 && GPU_NODES=$value ;;
        --gpus) number "$option" "$value" 1 64 && GPUS=$value ;;
        --cpus) number "$option" "$value" 1 1024 && CPUS=$value ;;
        --mem) number "$option" "$value" 100 100000000 && MEM=$value ;;
        --slurmd-timeout) number "$option" "$value" 5 3600 && SLURMD_TIMEOUT=$value ;;
        --cred-expire) number "$option" "$value" 5 3600 && CRED_EXPIRE=$value ;;
        --kill-wait) number "$option" "$value" 1 3600 && KILL_WAIT=$value ;;
        --grace) number "$option" "$value" 0 3600 && GRACE=$value ;;
        --shared-cmd) SHARED_CMD=$value ;;
        --conf) EXTRA+=$value$'\n' ;;
        -*) die 2 "up has no option $option; see --help" ;;
        *) number "the number of nodes" "$option" 1 200 && N=$((10#$option)) && shift && continue ;;
        esac
        shift 2
    done
    : "${GPU_NODES:=$(((2 * N + 1) / 3))}"
    ((GPU_NODES <= N)) || die 2 "--gpu-nodes $GPU_NODES is more than the $N nodes"
}
derive() { # the network and the ports come from the folder's name: two clusters never share them
    local hash
    hash=$(printf '%s' "$DIR" | cksum | cut -d' ' -f1)
    NET=10.$((64 + hash % 128)).$((hash / 128 % 250))
    PORT=$((10000 + hash / 32000 % 80 * 256))
    [[ $MODE == netns ]] && return
    local _ # all nodes share this machine's ports: take the next block while one of this is in use
    for _ in {1..80}; do
        ports_free "$PORT" $((PORT + N + 2)) && return
        PORT=$((PORT + 256 < 30480 ? PORT + 256 : 10000))
    done
    die "no $((N + 3)) free ports in a row between 10000 and 30480"
}
ports_free() { # FIRST LAST: no TCP socket listens on one of them
    local port
    while read -r _ port _ state _; do
        port=$((16#${port##*:}))
        [[ $state == 0A ]] && ((port >= $1 && port <= $2)) && return 1
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -v local_address)
    return 0
}
keep_settings() {
    local name
    for name in N GPU_NODES GPUS CPUS MEM SLURMD_TIMEOUT CRED_EXPIRE KILL_WAIT GRACE ACCOUNTING MODE NET PORT \
        SHARED_CMD EXTRA; do
        printf '%s=%q\n' "$name" "${!name}"
    done >"$RUN/cluster.env.new"
    mv "$RUN/cluster.env.new" "$RUN/cluster.env"
}

# ---- what must be there
PATH=$PATH:/usr/sbin:/sbin
install_slurm() {
    local missing=() tool
    local -A package=([slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client [munged]=munge)
    [[ $MODE != netns ]] || package[ip]=iproute2
    [[ $ACCOUNTING == no ]] || package+=([slurmdbd]=slurmdbd [mariadbd]=mariadb-server)
    for tool in "${!package[@]}"; do command -v "$tool" >/dev/null || missing+=("${package[$tool]}"); done
    [[ ${#missing[@]} -gt 0 ]] || return 0
    [[ " ${missing[*]} " != *" slurmdbd "* ]] || missing+=(slurm-wlm-mysql-plugin)
    command -v apt-get >/dev/null || die "missing: ${missing[*]}. Only Debian's and Ubuntu's can be installed from here;" \
        "install Slurm (slurmctld, slurmd, the client commands) and munge by this system's means, then run up again"
    [[ $UID == 0 ]] || die "missing: ${missing[*]}. Run up once as root, or: sudo apt-get install" \
        "--no-install-recommends ${missing[*]}"
    say "installing ${missing[*]} with apt"
    local log=$DIR/log/apt.log
    # policy-rc.d would be cleaner than stopping afterwards, but is not ours to write: RUNLEVEL=1 keeps invoke-rc.d
    # from starting the packages' own daemons
    if ! { RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive timeout 600 bash -c 'apt-get update -qq &&
        apt-get install -y -qq --no-install-recommends "$@"' apt "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
        tail -n 5 "$log" >&2
        die "apt could not install ${missing[*]}; the whole of it is in $log"
    fi
}
choose_mode() { # namespaces where they can be had
    [[ $MODE == netns ]] || return 0
    local why=""
    if [[ $UID != 0 ]]; then
        why="not root"
    elif ! timeout 10 unshare -n -u -m -p --fork true 2>/dev/null; then
        why="this root may not make namespaces (a container without CAP_SYS_ADMIN?)"
    elif command -v ip >/dev/null && ! timeout 10 unshare -n sh -c \
        'ip link add b0 type bridge && ip link add v0 type veth peer name v1' 2>/dev/null; then
        why="this kernel has no bridge or veth"
    fi
    [[ -n $why ]] || return 0
    MODE=loopback
    say "no namespaces: $why. All nodes share this machine's name, ports and processes; cut and join do not work"
}

# ---- configuration files
write_conf() {
    local half=$(((CPUS + 1) / 2)) me i host addr
    me=$(id -un)
    mkdir -p "$DIR"/{etc,run,log,state,spool,dev,shared}
    chmod 755 "$DIR" "$DIR"/{etc,run,log,spool,dev}
    chmod 1777 "$DIR/shared"
    # a fake GPU must be a character device (a plain file: the right count, but no CUDA_VISIBLE_DEVICES)
    for ((i = 0; i < GPUS; i++)); do ln -sfn /dev/null "$DIR/dev/nvidia$i"; done
    {
        printf '127.0.0.1 localhost\n::1 localhost\n%s.254 head\n' "$NET"
        for ((i = 1; i <= N; i++)); do echo "$NET.$i n$i"; done
    } >"$DIR/etc/hosts"
    if [[ $MODE == netns ]]; then host=head addr=$NET.254; else host=$(uname -n) host=${host%%.*} addr=127.0.0.1; fi
    echo "NodeName=n[1-$GPU_NODES] Name=gpu File=$DIR/dev/nvidia[0-$((GPUS - 1))]" >"$DIR/etc/gres.conf"
    echo "CgroupPlugin=cgroup/v1" >"$DIR/etc/cgroup.conf" # read even though nothing here uses cgroups
    cat >"$CONF" <<X
ClusterName=primehpcdev
SlurmctldHost=$host($addr)
SlurmctldPort=$PORT
AuthType=auth/munge
AuthInfo=socket=$RUN/munge.socket,cred_expire=$CRED_EXPIRE
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=$me
SlurmdUser=$me
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
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
    {
        [[ $ACCOUNTING == no ]] || printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd \
            "AccountingStorageHost=$addr" "AccountingStoragePort=$((PORT + 1))" \
            "AccountingStoragePass=$RUN/munge.socket" AccountingStorageTRES=gres/gpu
        node_lines "Boards=1 Sockets=2 CoresPerSocket=$half ThreadsPerCore=1 CPUs=$CPUS RealMemory=$MEM State=UNKNOWN"
        partition_lines
        printf '%s' "$EXTRA"
    } >>"$CONF"
    [[ $ACCOUNTING == no ]] || write_dbd_conf "$host" "$addr" "$me"
}
node_lines() { # SHAPE: CPU-only nodes have no Gres at all
    local i host address
    for ((i = 1; i <= N; i++)); do
        if [[ $MODE == netns ]]; then
            address="NodeHostname=n$i NodeAddr=$NET.$i Port=$((PORT + 2))"
        else
            host=$(uname -n)
            address="NodeHostname=${host%%.*} NodeAddr=127.0.0.1 Port=$((PORT + 2 + i))"
        fi
        if ((i <= GPU_NODES)); then echo "NodeName=n$i $address $1 Gres=gpu:$GPUS"; else echo "NodeName=n$i $address $1"; fi
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
write_dbd_conf() { # HOST ADDRESS USER
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
