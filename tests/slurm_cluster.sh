#!/usr/bin/env bash
# A SLURM cluster of four nodes on this machine, for tests: root on Debian or Ubuntu.
#
#   tests/slurm_cluster.sh start FOLDER   installs munge and SLURM where they are missing, starts them with
#                                         everything they write in FOLDER, and waits for the nodes
#   tests/slurm_cluster.sh stop FOLDER    ends what `start` started, and takes its lines out of /etc/hosts
#
# Use it with SLURM_CONF=FOLDER/slurm.conf. Exit status 3: it cannot be had here, and why.
set -euo pipefail
folder=$(realpath -m "$2")
mark="# maxramp test cluster $folder"

unavailable() { echo "no SLURM here: $1" >&2; exit 3; }

start() {
    [ "$(id -u)" = 0 ] || unavailable "not root"
    if ! command -v slurmctld slurmd munged sbatch > /dev/null; then
        command -v apt-get > /dev/null || unavailable "no apt-get"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends slurm-wlm munge; } > /dev/null 2>&1 || unavailable "apt-get fails"
    fi
    mkdir -p "$folder"/{state,spool,munge}
    chmod 755 "$folder"
    chown munge:munge "$folder/munge"
    dd if=/dev/urandom of="$folder/munge/key" bs=1024 count=1 2> /dev/null
    chown munge:munge "$folder/munge/key"
    chmod 400 "$folder/munge/key"
    # A socket, key and pid file of our own: a munged of this machine is left alone.
    su -s /bin/sh munge -c "/usr/sbin/munged --key-file='$folder/munge/key' \
        --socket='$folder/munge/socket' --pid-file='$folder/munge/pid' \
        --log-file='$folder/munge/log' --seed-file='$folder/munge/seed'"
    local host
    host=$(hostname -s)
    cat > "$folder/slurm.conf" << CONF
ClusterName=maxramp
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=17000
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
ReturnToService=2
KillWait=5
MinJobAge=300
MpiDefault=none
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
NodeName=n[0-3] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17004] CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    echo "127.0.0.1 n0 n1 n2 n3 $mark" >> /etc/hosts
    export SLURM_CONF="$folder/slurm.conf"
    slurmctld
    for node in n0 n1 n2 n3; do slurmd -N "$node"; done
    for _ in $(seq 60); do
        [ "$(sinfo -h -N -t idle -o %N 2> /dev/null | wc -l)" = 4 ] && return
        sleep 0.5
    done
    sinfo >&2 || true
    tail -n 5 "$folder"/slurmctld.log "$folder"/n0.log >&2 || true
    stop
    unavailable "its nodes do not come up"
}

stop() {
    export SLURM_CONF="$folder/slurm.conf"
    scancel --full --state=RUNNING --signal=KILL 2> /dev/null || true
    scancel -u root 2> /dev/null || true
    sleep 1
    for file in "$folder"/n?.pid "$folder"/slurmctld.pid "$folder"/munge/pid; do
        [ -s "$file" ] && kill "$(cat "$file")" 2> /dev/null || true
    done
    for file in "$folder"/n?.pid "$folder"/slurmctld.pid "$folder"/munge/pid; do
        for _ in $(seq 20); do
            [ -s "$file" ] && kill -0 "$(cat "$file")" 2> /dev/null || break
            sleep 0.25
        done
    done
    # /etc/hosts may be a mount of its own, which sed -i could not replace.
    grep -vF "$mark" /etc/hosts > "$folder/hosts" && cat "$folder/hosts" > /etc/hosts
}

case $1 in start | stop) "$1" ;; *) echo "usage: $0 start|stop FOLDER" >&2; exit 2 ;; esac
