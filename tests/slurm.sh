#!/bin/bash
# Runs a command against a private Slurm of one node, which it starts and stops; not part of CI.
#
#   tests/slurm.sh .venv/bin/python -m pytest tests/test_benchmark.py -k slurm
#   PROCTRACK=pgid tests/slurm.sh ...                 the other way of Slurm to find a job's processes
#
# Wants root and Debian's packages munge, slurmctld, slurmd, slurm-client (seen with 22.05). All files are in a folder of
# its own, all ports on the loopback; a Slurm that runs already is not touched.
set -euo pipefail
(($#)) || { echo "slurm.sh: error: no command given, accepted: what to run against the Slurm" >&2; exit 2; }
for program in munged slurmctld slurmd sinfo; do
  PATH=$PATH:/usr/sbin command -v $program > /dev/null || { echo "slurm.sh: error: no $program here" >&2; exit 2; }
done
export PATH=$PATH:/usr/sbin
folder=$(mktemp -d) host=$(hostname -s) cores=4 # more than there are, so that an array of four runs at once
export SLURM_CONF=$folder/slurm.conf
stop() {
  local name
  for name in slurmd slurmctld munged; do kill "$(cat "$folder/$name.pid" 2> /dev/null)" 2> /dev/null || true; done
  sleep 1
  rm -rf "$folder"
}
trap stop EXIT
chmod 755 "$folder" # munged wants nobody else to be able to write there
mkdir -m 755 "$folder/munge"
(umask 077 && head -c 1024 /dev/urandom > "$folder/munge.key")
cat > "$SLURM_CONF" << CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$((20000 + RANDOM % 10000))
SlurmdPort=$((30000 + RANDOM % 10000))
SlurmUser=root
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/${PROCTRACK:-linuxproc}
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=10
ReturnToService=2
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores RealMemory=2000
PartitionName=low Nodes=$host Default=YES PriorityTier=1
PartitionName=high Nodes=$host PriorityTier=2
CONF
mkdir "$folder/state" "$folder/spool"
munged --key-file="$folder/munge.key" --socket="$folder/munge/socket" --pid-file="$folder/munged.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
slurmctld -f "$SLURM_CONF"
slurmd -f "$SLURM_CONF" -N "$host"
for _ in {1..60}; do # an idle node is no proof, a job that has run is
  sinfo --noheader --format=%t 2> /dev/null | grep -q idle && timeout 30 srun --quiet true && ready=1 && break
  sleep 1
done
[[ -n ${ready-} ]] || { tail "$folder"/*.log >&2; echo "slurm.sh: error: no job runs, see above" >&2; exit 1; }
"$@"
