#!/bin/bash
# Launches every run of one of the paper's figures, survives interruption, and ends with the figure and the table.
#
#   ./benchmark.sh quick                                   a small PPO against SPRL, ten minutes on two cores
#   ./benchmark.sh minigrid --seeds 6 --workers 2          the paper's MiniGrid figure
#   ./benchmark.sh minigrid --only sprl,KeyDoors-7x7 --dry-run
#   ./benchmark.sh minigrid --slurm --sbatch "--partition=gpu --time=4:00:00 --mem=8G"
#
# Blocks: minigrid ablation-k ablation-tolerance ablation-stack gt-rnet quick all
# --seeds N        seeds 1..N of every run (default: the paper's number for the block)
# --workers W      runs at a time (default: the number of cores)
# --steps N        environment steps of every run (default: the block's)
# --only A,B       only the methods and environments named; an environment's name may be shortened
# --python PATH    the interpreter (default: .venv/bin/python if there is one, else python3)
# --track          mirror the charts to Weights & Biases
# --dry-run        print the commands, run nothing
# --slurm          submit one array job, a task per run; --sbatch "FLAGS" are handed to sbatch
#
# Started again, it skips what is finished and resumes what was killed. Every line that --dry-run prints can be copied.
set -uo pipefail
cd "$(dirname "$0")" || exit 2

die() { echo "benchmark.sh: error: $1" >&2; exit 2; }
whole() { [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 $2 is not a whole number of at least 1"; }

blocks="minigrid ablation-k ablation-tolerance ablation-stack gt-rnet quick all"
block=${1:-}; shift || true
[[ $block == --help || $block == -h ]] && { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0; }
[[ " $blocks " == *" $block "* && -n $block ]] || die "unknown block '$block', accepted: $blocks"
seeds='' workers=$(nproc) steps='' only='' track='' dry='' slurm='' sbatch_flags='' task=''
python=python3; [[ -x .venv/bin/python ]] && python=.venv/bin/python
while (($#)); do
  case $1 in
    --seeds|--workers|--steps|--task) [[ $# -gt 1 ]] || die "$1 needs a number"; whole "$1" "$2"; declare "${1#--}=$2"; shift 2 ;;
    --only|--python|--sbatch) [[ $# -gt 1 ]] || die "$1 needs a value"
      case $1 in --only) only=$2 ;; --python) python=$2 ;; --sbatch) sbatch_flags=$2 ;; esac; shift 2 ;;
    --track) track=--track; shift ;;
    --dry-run) dry=1; shift ;;
    --slurm) slurm=1; shift ;;
    *) die "unknown option '$1', see ./benchmark.sh --help" ;;
  esac
done

# THE RUNS ############################################################################################################
names=() commands=() folder=results/$block
wanted() { # label environment
  [[ -z $only ]] && return 0
  local word methods='' worlds='' method_ok='' world_ok=''
  for word in ${only//,/ }; do
    if [[ " ppo sprl gt-sprl eco icm gt-grid " == *" $word "* || $1 == "$word" ]]; then
      methods=1; [[ $1 == "$word" ]] && method_ok=1
    else
      worlds=1; [[ $2 == *"$word"* ]] && world_ok=1
    fi
  done
  [[ -z $methods || -n $method_ok ]] && [[ -z $worlds || -n $world_ok ]]
}
runs() { # seeds steps label environment script [flags]: one run per seed
  local seed label=$3 env=$4 script=$5
  wanted "$label" "$env" || return 0
  for seed in $(seq 1 "${seeds:-$1}"); do
    names+=("${env}__${label}__s${seed}")
    commands+=("$script --env-id $env --seed $seed --total-timesteps ${steps:-$2}${6:+ $6} --run-name ${names[-1]}${track:+ $track}")
  done
}

minigrid() {
  folder=results/minigrid
  local env n
  for env in FourRooms-7x7 FourRooms-11x11 KeyDoors-7x7 KeyDoors-11x11; do
    n=500000; [[ $env == KeyDoors-7x7 ]] && n=1000000; [[ $env == *11x11 ]] && n=2000000
    runs 6 $n ppo MiniGrid-$env-v0 ppo_sprl_minigrid.py "--cost-scale 0 --learning-rate 0.003"
    runs 6 $n sprl MiniGrid-$env-v0 ppo_sprl_minigrid.py "--cost-scale 0.02 --learning-rate 0.003 --k 2 --num-tolerance-samples 60"
    runs 6 $n eco MiniGrid-$env-v0 ppo_eco.py "--bonus-scale 0.001 --learning-rate 0.003 --k 3"
    runs 6 $n icm MiniGrid-$env-v0 ppo_icm.py "--bonus-scale 0.1 --learning-rate 0.003"
    runs 6 $n gt-grid MiniGrid-$env-v0 ppo_gtgrid.py "--bonus-scale 0.01 --learning-rate 0.003"
  done
}
ablation-k() { # figure 9: the paper's MiniGrid ablations use one tolerance sample, k = 5 and a tolerance of 25
  for k in 3 5 7; do
    runs 6 500000 "k$k" MiniGrid-FourRooms-7x7-v0 ppo_sprl_minigrid.py "--k $k --tolerance 25 --num-tolerance-samples 1"
  done
}
ablation-tolerance() { # figure 11
  for t in 10 15 25 50; do
    runs 6 500000 "tolerance$t" MiniGrid-FourRooms-7x7-v0 ppo_sprl_minigrid.py "--k 5 --tolerance $t --num-tolerance-samples 1"
  done
}
ablation-stack() { # figure 13
  for m in 0 1 5; do
    runs 6 500000 "stack$m" MiniGrid-FourRooms-7x7-v0 ppo_sprl_minigrid.py "--stack-observations $m"
  done
}
gt-rnet() { # Appendix B: the learned network against the true reachability
  for env in FourRooms-7x7 KeyDoors-7x7; do
    runs 6 500000 sprl MiniGrid-$env-v0 ppo_sprl_minigrid.py ""
    runs 6 500000 gt-sprl MiniGrid-$env-v0 ppo_sprl_minigrid.py "--rnet oracle"
  done
}
quick() {
  runs 2 250000 ppo MiniGrid-FourRooms-7x7-v0 ppo_sprl_minigrid.py "--cost-scale 0"
  runs 2 250000 sprl MiniGrid-FourRooms-7x7-v0 ppo_sprl_minigrid.py ""
}
all() { minigrid; ablation-k; ablation-tolerance; ablation-stack; gt-rnet; folder=results/all; }

"$block"
total=${#names[@]}
((total)) || die "--only $only leaves no run of $block"

# ONE RUN #############################################################################################################
line_of() { # the command of run i, resuming it if it was killed
  local name=${names[$1]} command=${commands[$1]}
  [[ -e runs/$name/agent.pt ]] && command="${command%% *} --resume runs/$name/agent.pt"
  echo "$python $command"
}
finished() { [[ -e runs/${names[$1]}/finished ]]; }
mark() { # a run that ended well and was not stopped by a signal is finished
  local name=${names[$1]}
  tail -n 5 "runs/$name/log.txt" | tr '\r' '\n' | grep -q '^stopped by' || touch "runs/$name/finished"
}

if [[ -n $dry ]]; then
  for i in "${!names[@]}"; do finished "$i" && echo "# finished: ${names[$i]}" || line_of "$i"; done
  exit 0
fi
if [[ -n $task ]]; then # inside Slurm: python in the place of this shell gets the signals first-hand
  i=$((task - 1))
  ((i < total)) || die "--task $task, accepted: 1 to $total"
  finished $i && exit 0
  mkdir -p "runs/${names[$i]}"
  $(line_of $i) >> "runs/${names[$i]}/log.txt" 2>&1 &
  child=$!
  trap 'kill -TERM $child' TERM INT
  while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
  ((code == 0)) && mark $i
  exit $code
fi
if [[ -n $slurm ]]; then
  command -v sbatch > /dev/null || die "--slurm needs sbatch on the PATH"
  mkdir -p runs
  again="$(printf '%q ' "$PWD/benchmark.sh" "$block")${seeds:+--seeds $seeds }${steps:+--steps $steps }${only:+--only $only }${track:+$track }--python $python"
  # shellcheck disable=SC2086
  exec sbatch --job-name="sprl-$block" --array=1-"$total" --requeue --open-mode=append --signal=TERM@60 \
    --output="runs/slurm-%A-%a.txt" $sbatch_flags --wrap "exec $again --task \$SLURM_ARRAY_TASK_ID"
fi

# ALL RUNS ############################################################################################################
((workers > 1)) && export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
declare -A running=() failed=()
done_before=0 done_now=0 start=$SECONDS stopping=''
for i in "${!names[@]}"; do finished "$i" && done_before=$((done_before + 1)); done
stop() { stopping=1; for pid in "${!running[@]}"; do kill -TERM "$pid" 2>/dev/null; done; }
trap stop INT TERM
progress() {
  local left='' open=$((total - done_before - done_now - ${#failed[@]}))
  ((done_now)) && left=", about $(((SECONDS - start) * open / done_now / 60 + 1)) min left"
  printf '%s: %d done, %d running, %d failed of %d%s\n' "$block" $((done_before + done_now)) ${#running[@]} ${#failed[@]} "$total" "$left"
}
collect() { # takes the runs that have ended out of the table
  local pid i
  for pid in "${!running[@]}"; do
    kill -0 "$pid" 2>/dev/null && continue
    i=${running[$pid]}; unset "running[$pid]"
    if wait "$pid"; then
      mark "$i"; finished "$i" && done_now=$((done_now + 1))
    else
      failed[$i]=1
    fi
    progress
  done
}
for i in "${!names[@]}"; do
  finished "$i" && continue
  while ((${#running[@]} >= workers)) && [[ -z $stopping ]]; do sleep 1; collect; done
  [[ -n $stopping ]] && break
  mkdir -p "runs/${names[$i]}"
  $(line_of "$i") >> "runs/${names[$i]}/log.txt" 2>&1 &
  running[$!]=$i
  progress
done
while ((${#running[@]})); do sleep 1; collect; done
[[ -n $stopping ]] && { echo "stopped; start it again to go on"; exit 130; }

for i in "${!failed[@]}"; do
  echo "failed: runs/${names[$i]}/log.txt: $(tr '\r' '\n' < "runs/${names[$i]}/log.txt" | tail -n 1)" >&2
done
for i in "${!names[@]}"; do
  finished "$i" || continue
  label=${names[$i]#*__}
  "$python" analysis/curves.py export "runs/${names[$i]}/agent.pt" --out "$folder" --label "${label%__s*}"
done
"$python" analysis/curves.py figure "$folder" && echo "figure and table: $folder"
((${#failed[@]} == 0))
