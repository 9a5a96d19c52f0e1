#!/bin/bash
# Launches every run of one of the paper's figures, survives interruption, and ends with the figure, the tables, a report
# page and the paper's claim beside them.
#
#   ./benchmark.sh quick                                   a small PPO against SPRL, ten minutes on two cores
#   ./benchmark.sh minigrid --seeds 6 --workers 2          the paper's MiniGrid figure
#   ./benchmark.sh minigrid --only sprl,KeyDoors-7x7 --dry-run
#   ./benchmark.sh minigrid --slurm --sbatch "--partition=gpu --time=4:00:00 --mem=8G"
#
# --seeds N        seeds 1..N of every run (default: the paper's number for the block)
# --workers W      runs at a time (default: the number of cores)
# --steps N        environment steps of every run (default: the block's); BLOCK then is BLOCK-N in all names below
# --only A,B       only the methods and environments named, where both are named those methods on those environments;
#                  an environment's name may be shortened
# --engine E       of dmlab: deepmind_lab, its stand-in labmaze, or auto, deepmind_lab if it imports (default)
# --python PATH    the interpreter (default: .venv/bin/python if there is one, else python3)
# --track          mirror the charts to Weights & Biases
# --dry-run        print the commands, run nothing
# --slurm          submit an array job, a task per run (two for all); --sbatch "FLAGS" are handed to sbatch
#
# The block all is every block but quick and minigrid-paper.
# Started again, it skips what is finished and resumes what was killed, and refuses to go on with a run that was made
# with other flags; two at a time do not start a run twice.
# Every line that --dry-run prints can be copied. Runs go to runs/BLOCK__ENV__METHOD__sSEED, their figures and tables to
# runs/results/BLOCK (results/ is what we measured); there dmlab is called dmlab-ENGINE, for scores of the stand-in are
# not DeepMind Lab's.
# shellcheck disable=SC2317 # the blocks are called by name
set -uo pipefail
here=$PWD
cd "$(dirname "$0")" || exit 2

# THE RUNS ############################################################################################################
# A function block:NAME is the block NAME; nothing else has to know of it.
names=() blocks=() labels=() envs=() sizes=() commands=()
declare -A claims=() # what the paper says of a block's figure
runs() { # seeds steps label environment[:condition] script [flags]: one run per seed
  local seed label=$3 env=${4/:/-} size=${steps:-$2} block=$name
  [[ $block == dmlab* ]] && block+=-$engine
  block+=${steps:+-$steps} # other steps are another schedule: not to be resumed from, nor shown beside the block's own
  claims[$block]=$claim
  for seed in $(seq 1 "${seeds:-$1}"); do # the block is in the name: the same method may differ from block to block
    names+=("${block}__${env}__${label}__s$seed") blocks+=("$block") labels+=("$label") envs+=("$env") sizes+=("$size")
    commands+=("$5 --env-id ${4%:*} --seed $seed --total-timesteps $size ${*:6} --run-name ${names[-1]}")
    [[ -n $track ]] && commands[-1]+=" --track --wandb-project-name sprl-$block" # a panel must not mix blocks
  done
}
four_rooms=MiniGrid-FourRooms-7x7-v0
grids=(MiniGrid-{FourRooms,KeyDoors}-{7x7,11x11}-v0)
grid_steps() { case $1 in *11x11*) echo 2000000 ;; *Key*) echo 1000000 ;; *) echo 500000 ;; esac; }
# measured best on MiniGrid; the paper has 0.002 and 0.01, and the 90th percentile (README)
grid_sprl='--cost-scale 0.01 --learning-rate 0.003 --ent-coef 0.01 --negative-bias 20 --positive-bias 5'
grid_window='--k 2 --tolerance 1 --num-tolerance-samples 60 --cost-percentile 97'
memory='--memory-size 200 --memory-percentile 90 --positive-bias 5' # ECO's everywhere
figure_3='SPRL beats PPO, ECO, ICM and GT-Grid on all four tasks; the last three are near PPO at 7x7 (figure 3).'
block:minigrid() {
  local env n flags='--learning-rate 0.003 --ent-coef 0.01'
  local claim=$figure_3
  for env in "${grids[@]}"; do
    n=$(grid_steps "$env")
    runs 6 "$n" ppo "$env" ppo_sprl_minigrid.py --cost-scale 0 "$flags"
    runs 6 "$n" sprl "$env" ppo_sprl_minigrid.py "$grid_sprl $grid_window"
    # measured best; the paper has 0.001 for ECO and 0.1 for ICM
    runs 6 "$n" eco "$env" ppo_eco.py --bonus-scale 0.3 "$flags" --bonus-bias 0.5 --k 3 --negative-bias 20 "$memory"
    runs 6 "$n" icm "$env" ppo_icm.py --bonus-scale 0.001 "$flags" --forward-loss-weight 0.8 --icm-loss-scale 0.3
    runs 6 "$n" gt-grid "$env" ppo_gtgrid.py --bonus-scale 0.01 "$flags"
  done
}
block:minigrid-paper() { # the same with the paper's own settings, which learn little here (README)
  local env n flags='--ent-coef 0.01 --encoding raw'
  local rnet='--negative-bias 20 --rnet-triplets 15000 --rnet-learning-rate 0.0003'
  local claim=$figure_3
  for env in "${grids[@]}"; do
    n=$(grid_steps "$env")
    runs 6 "$n" ppo "$env" ppo_sprl_minigrid.py --cost-scale 0 --learning-rate 0.003 "$flags"
    runs 6 "$n" sprl "$env" ppo_sprl_minigrid.py --cost-scale 0.002 --learning-rate 0.01 "$flags" --k 2 --tolerance 1 \
      --num-tolerance-samples 60 --cost-percentile 90 --positive-bias 5 "$rnet"
    runs 6 "$n" eco "$env" ppo_eco.py --bonus-scale 0.001 --learning-rate 0.003 "$flags" --bonus-bias 0.5 --k 3 \
      "$memory $rnet"
    runs 6 "$n" icm "$env" ppo_icm.py --bonus-scale 0.1 --learning-rate 0.003 "$flags" --forward-loss-weight 0.8 \
      --icm-loss-scale 0.3
    runs 6 "$n" gt-grid "$env" ppo_gtgrid.py --bonus-scale 0.01 --learning-rate 0.003 "$flags"
  done
}
block:atari() { # a GPU each; on a CPU add --rnet-width 16 --rnet-input embedding-difference
  local env flags='--learning-rate 0.0005 --ent-coef 0.01'
  local claim='SPRL beats PPO, ECO and ICM on all games but Ms. Pacman; PPO and ICM stay at 0 in Montezuma (figure 5).'
  for env in MontezumaRevenge-v5 Freeway-v5 MsPacman-v5 Gravitar-v5 Seaquest-v5 Hero-v5; do
    runs 4 10000000 ppo "$env" ppo_sprl_atari.py --cost-scale 0 "$flags"
    runs 4 10000000 sprl "$env" ppo_sprl_atari.py --cost-scale 0.05 "$flags" --k 12 --tolerance 1 \
      --num-tolerance-samples 200 --negative-bias 80 --positive-bias 5
    runs 4 10000000 eco "$env" ppo_eco.py --bonus-scale 0.001 --bonus-bias 0.5 "$flags" --k 12 --negative-bias 80 \
      "$memory"
    runs 4 10000000 icm "$env" ppo_icm.py --bonus-scale 0.01 "$flags" --forward-loss-weight 1 --icm-loss-scale 1
  done
  runs 4 10000000 gt-grid MontezumaRevenge-v5 ppo_gtgrid.py --bonus-scale 0.01 "$flags" --cell-size 16 # not in the paper
}
mazes=(explore_{goal_locations_{small,large},object_rewards_many})
find_engine() {
  [[ $engine == auto ]] && engine=labmaze && "$python" -c 'import deepmind_lab' > /dev/null 2>&1 && engine=deepmind_lab
}
dmlab_sprl() { # label environment k tolerance stack
  runs 4 20000000 "$1" "$2" ppo_sprl_dmlab.py --engine "$engine" --cost-scale 0.06 --cost-bias 0.5 --k "$3" \
    --tolerance "$4" --num-tolerance-samples 200 --negative-bias 20 --positive-bias 5 --stack-observations "$5" \
    --learning-rate 0.0003 --ent-coef 0.004 --max-grad-norm 10
}
block:dmlab() { # a GPU each; on a CPU add --rnet-width 16
  local env flags='--learning-rate 0.00025'
  local claim='SPRL is best on all three tasks, most so in goal locations large, and even above GT-Grid (figure 4).'
  find_engine
  for env in "${mazes[@]}"; do
    runs 4 20000000 ppo "$env" ppo_sprl_dmlab.py --engine "$engine" --cost-scale 0 --learning-rate 0.00019 \
      --ent-coef 0.0011 --max-grad-norm 0.5
    dmlab_sprl sprl "$env" 10 1 0
    runs 4 20000000 eco "$env" ppo_eco.py --engine "$engine" --bonus-scale 0.03 --bonus-bias 0.5 --k 5 --negative-bias 20 \
      "$memory $flags" --ent-coef 0.0021
    runs 4 20000000 icm "$env" ppo_icm.py --engine "$engine" --bonus-scale 0.55 --bonus-clip 1 \
      --forward-loss-weight 0.96 --icm-loss-scale 64 "$flags" --ent-coef 0.0042
    runs 4 20000000 gt-grid "$env" ppo_gtgrid.py --engine "$engine" --bonus-scale 0.0525 --cell-size 30 "$flags" \
      --ent-coef 0.0066
  done
}
block:dmlab-k() {
  local env k claim='k = 10 is best of 1, 3, 10 and 30 (figure 9).'
  find_engine
  for env in "${mazes[@]}"; do for k in 1 3 10 30; do dmlab_sprl "k$k" "$env" "$k" 1 0; done; done
}
block:dmlab-tolerance() {
  local env t claim='A tolerance of 1 is best of 1, 2, 3 and 5 (figure 11).'
  find_engine
  for env in "${mazes[@]}"; do for t in 1 2 3 5; do dmlab_sprl "tolerance$t" "$env" 10 "$t" 0; done; done
}
block:dmlab-stack() {
  local env m claim='No stacking is best; the policy sees 0, 1, 5 or 10 observations before the current one (figure 13).'
  find_engine
  for env in "${mazes[@]}"; do for m in 0 1 5 10; do dmlab_sprl "stack$m" "$env" 10 1 "$m"; done; done
}
fetch_runs() { # environment[:condition] steps [flags]: all methods on one task
  local rate='--learning-rate 0.0005' # the paper's table names the noise for all but SPRL, whose task is the same one
  runs 4 "$2" ppo "$1" ppo_sprl_fetch.py --cost-scale 0 "$rate" --ent-coef 0.01 "${@:3}"
  # measured: with the paper's weight, 0.05, SPRL does not learn (README)
  runs 4 "$2" sprl "$1" ppo_sprl_fetch.py --cost-scale 0.0005 --cost-bias 1 --k 10 --tolerance 1 \
    --num-tolerance-samples 20 --negative-bias 12 --positive-bias 5 "$rate" --ent-coef 0.001 "${@:3}"
  runs 4 "$2" eco "$1" ppo_eco.py --bonus-scale 0.0001 --bonus-bias 1 --k 10 --negative-bias 12 "$memory $rate" \
    --ent-coef 0.001 "${@:3}"
  runs 4 "$2" icm "$1" ppo_icm.py --bonus-scale 0.001 --forward-loss-weight 1 --icm-loss-scale 1 "$rate" \
    --ent-coef 0.001 "${@:3}"
}
block:fetch() {
  local env claim='SPRL beats PPO, ECO and ICM on Push, Slide and PickAndPlace; on Reach all are alike (figure 6).'
  for env in Fetch{Reach,Push,Slide,PickAndPlace}-v4; do fetch_runs "$env" 1000000 --action-noise 0.003; done
}
block:fetch-sparsity() { # fewer simulator steps per action: a longer way to the same goal
  local n claim='The sparser the reward, the fewer substeps, the further SPRL is ahead of the others (figure 15).'
  for n in 2 3 4 6; do fetch_runs "FetchReach-v4:substeps$n" 1000000 --action-noise 0.003 --n-substeps "$n"; done
}
block:fetch-noise() {
  local pair sigma claim='Noise on the actions costs SPRL the least (figure 16).'
  for pair in FetchReach-v4:3 FetchPush-v4:8 FetchSlide-v4:10 FetchPickAndPlace-v4:10; do
    for sigma in 0.03 0.1 0.3; do
      fetch_runs "${pair%:*}:substeps${pair#*:}-noise$sigma" 1000000 --action-noise "$sigma" --n-substeps "${pair#*:}"
    done
  done
}
# The ablations' MiniGrid figures use one tolerance sample, k = 5 and a tolerance of 25, unlike the paper's table.
block:ablation-k() {
  local env k claim='k = 5 is best of 3, 5 and 7 (figure 10).'
  for env in "${grids[@]}"; do
    for k in 3 5 7; do
      runs 6 "$(grid_steps "$env")" "k$k" "$env" ppo_sprl_minigrid.py "$grid_sprl" --k "$k" --tolerance 25 \
        --num-tolerance-samples 1
    done
  done
}
block:ablation-tolerance() {
  local env t claim='A tolerance of 25 is best of 10, 15, 25 and 50 (figure 12).'
  for env in "${grids[@]}"; do
    for t in 10 15 25 50; do
      runs 6 "$(grid_steps "$env")" "tolerance$t" "$env" ppo_sprl_minigrid.py "$grid_sprl" --k 5 --tolerance "$t" \
        --num-tolerance-samples 1
    done
  done
}
block:ablation-stack() {
  local env m claim='No stacking is best; the policy sees 0, 1 or 5 observations before the current one (figure 14).'
  for env in "${grids[@]}"; do
    for m in 0 1 5; do
      runs 6 "$(grid_steps "$env")" "stack$m" "$env" ppo_sprl_minigrid.py "$grid_sprl $grid_window" \
        --stack-observations "$m"
    done
  done
}
block:gt-rnet() { # Appendix B: the learned network against the true reachability
  local env claim='SPRL and GT-SPRL are alike, with the learned RNet even better on both tasks (figure 21).'
  for env in MiniGrid-{FourRooms,KeyDoors}-7x7-v0; do
    runs 6 "$(grid_steps "$env")" sprl "$env" ppo_sprl_minigrid.py "$grid_sprl $grid_window" --rnet learned
    runs 6 "$(grid_steps "$env")" gt-sprl "$env" ppo_sprl_minigrid.py "$grid_sprl $grid_window" --rnet oracle
  done
}
block:quick() {
  local claim='SPRL learns faster than PPO.'
  runs 2 250000 ppo "$four_rooms" ppo_sprl_minigrid.py --cost-scale 0 --learning-rate 0.003 --ent-coef 0.01
  runs 2 250000 sprl "$four_rooms" ppo_sprl_minigrid.py "$grid_sprl $grid_window"
}
accepted=$(declare -F | sed -n 's/^declare -f block://p' | tr '\n' ' ')all

# OPTIONS #############################################################################################################
die() { echo "benchmark.sh: error: $1" >&2; exit 2; }
block='' seeds='' steps='' only='' track='' dry='' slurm='' sbatch='' task='' python=python3 engine=auto
workers=$(env -u OMP_NUM_THREADS nproc) # all cores, which nproc would not say with that variable
[[ -x .venv/bin/python ]] && python=.venv/bin/python
declare -A most=([--seeds]=1000 [--workers]=1000 [--steps]=2147483647 [--task]=1000000)
while (($#)); do
  case $1 in
    -h|--help) sed -n '2,/^# shell/p' benchmark.sh | sed '$d; s/^# \{0,1\}//'; echo "Blocks: $accepted"; exit 0 ;;
    --seeds|--workers|--steps|--task)
      [[ ${2-} =~ ^[1-9][0-9]{0,9}$ ]] && (($2 <= ${most[$1]})) ||
        die "$1 '${2-}', accepted: a whole number from 1 to ${most[$1]}"
      declare "${1#--}=$2"; shift ;;
    --only|--python|--sbatch) [[ -n ${2-} ]] || die "$1 needs a value"
      [[ $1 == --python && $2 == [!/]*/* ]] && set -- "$1" "$here/$2" "${@:3}" # named from where the user is
      declare "${1#--}=$2"; shift ;;
    --engine) engine=${2-}
      [[ $engine =~ ^(auto|deepmind_lab|labmaze)$ ]] || die "--engine '$engine', accepted: auto deepmind_lab labmaze"
      shift ;;
    --track) track=--track ;;
    --dry-run) dry=1 ;;
    --slurm) slurm=1 ;;
    -*) die "unknown option '$1', see ./benchmark.sh --help" ;;
    *) [[ -z $block ]] || die "two blocks, '$block' and '$1', accepted: one"
      [[ " $accepted " == *" $1 "* ]] || die "unknown block '$1', accepted: $accepted"
      block=$1 ;;
  esac
  shift
done
[[ -n $block ]] || die "no block given, accepted: $accepted"
command -v "$python" > /dev/null || die "--python $python: no such program"
for name in ${accepted% all}; do
  [[ $block == "$name" || ($block == all && $name != @(quick|minigrid-paper)) ]] && "block:$name"
done

todo=("${!names[@]}") methods='' worlds=() # todo: the numbers of the runs that --only leaves
IFS=, read -ra words <<< "$only"
for word in ${words[@]+"${words[@]}"}; do # a method, or a part of an environment's name
  if [[ " ${labels[*]} " == *" $word "* ]]; then methods+=" $word "
  elif [[ -n $word && " ${envs[*]} " == *"$word"* ]]; then worlds+=("$word")
  else die "--only '$word', accepted: $(printf '%s\n' "${labels[@]}" "${envs[@]}" | awk '!n[$0]++' | paste -sd' ')"; fi
done
for i in "${todo[@]}"; do
  fits=''; for word in "${worlds[@]-}"; do [[ ${envs[i]} == *"$word"* ]] && fits=1; done
  [[ -n $fits && (-z $methods || $methods == *" ${labels[i]} "*) ]] || unset "todo[i]"
done
((${#todo[@]})) || die "--only $only leaves no run of $block"

# ONE RUN #############################################################################################################
settings() { sed -E 's/ --(resume|wandb-project-name) [^ ]*//g; s/ --track//; s/ --/\n--/g' <<< "$1" | sort; }
logged() { sed -nE 's/^\$ .* (ppo_[a-z_]+\.py )/\1/p' "runs/${names[$1]}/log.txt" 2> /dev/null | tail -n 1; }
same_flags() { # run i has the flags that its checkpoint, as far as its log tells, was made with
  local was; [[ -e runs/${names[$1]}/agent.pt ]] && was=$(logged "$1") && [[ -n $was ]] || return 0
  [[ "$(settings "$was")" == "$(settings "${commands[$1]}")" ]]
}
refuse() {
  local was; was=$(comm -23 <(settings "$(logged "$1")") <(settings "${commands[$1]}") | paste -sd' ')
  echo "runs/${names[$1]} was made with other flags (${was:-fewer}), move it away to run it anew" >&2
}
finished() { # run i has ended well, with at least the steps that are asked for now
  local reached; reached=$(cat "runs/${names[$1]}/finished" 2> /dev/null)
  [[ $reached =~ ^[0-9]+$ && -e runs/${names[$1]}/agent.pt ]] && ((reached >= sizes[$1]))
}
line_of() { # the command of run i, which resumes what was killed
  local resume=''; [[ -e runs/${names[$1]}/agent.pt ]] && resume=" --resume runs/${names[$1]}/agent.pt"
  printf '%q %s\n' "$python" "${commands[$1]}$resume"
}
stopped() { awk '/^\$ /{s = 0} /^stopped by SIG/{s = 1} END {exit !s}' "$1"; } # the log's last run was, by a signal
train() { # run i to its end; 75: someone else is at it. A signal is handed on, and python's saving waited for
  local folder=runs/${names[$1]} log=runs/${names[$1]}/log.txt child='' got='' late='' line code
  trap 'got=1; kill -TERM $child 2> /dev/null' TERM INT
  [[ -n $task ]] && trap 'got=1 late=1; kill -TERM $child 2> /dev/null' USR1 # Slurm's time limit is near
  trap '' HUP # python must not die of a closed terminal before it has saved
  mkdir -p "$folder" && exec 9> "$folder/lock" || return 1
  flock --nonblock --conflict-exit-code 75 9 # python inherits the lock, it holds even if this shell is killed
  (($? == 75)) && return 75
  same_flags "$1" || { refuse "$1"; return 1; }
  finished "$1" && return 0
  line=$(line_of "$1")
  local over=''; [[ -t 1 ]] && over=$'\r\e[K' # the progress; with the line in one write, or progress gets between
  printf '%s\n' "$over$line"
  printf '\n$ %s\n' "$line" >> "$log" || return 1
  eval "exec $line" >> "$log" 2>&1 &
  child=$!
  [[ -n $got ]] && kill -TERM $child
  while got=${got:+0}; wait $child; code=$?; [[ $got == 1 ]]; do :; done # a signal ends a wait, not the child
  # a script ends with 0 after a signal too, and says so below its command in the log
  stopped "$log"
  (($? == 1 && code == 0)) && [[ -z $got ]] && # 2: the log is gone, and with it the word
    echo "${sizes[$1]}" > "$folder/finished"
  [[ -n $late && $folder/agent.pt -nt $folder/lock ]] && scontrol requeue "$SLURM_JOB_ID" # it got on, so it may go on
  return $code
}

if [[ -n $task && -z $dry ]]; then # one task of the array
  ((task <= ${#names[@]})) || die "--task $task, accepted: 1 to ${#names[@]}"
  export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
  train $((task - 1)); code=$?
  ((code == 75)) && echo "another benchmark.sh is at ${names[task - 1]}" >&2
  exit $code
fi
code=0
declare -A state=() # of every run: left, running, finished, failed, elsewhere, or other, made with other flags
for i in "${todo[@]}"; do
  if ! same_flags "$i"; then state[$i]=other code=1; refuse "$i"
  elif finished "$i"; then state[$i]=finished
  else state[$i]=left; fi
done
if [[ -n $dry ]]; then
  for i in "${todo[@]}"; do
    case ${state[$i]} in left) line_of "$i" ;; finished) echo "# finished: ${names[i]}" ;; esac
  done
  exit $code
fi
last_words() { tr '\r' '\n' < "runs/${names[$1]}/log.txt" | tr -cd '[:print:]\n' | grep . | tail -n 1 | cut -c 1-200; }
draw() { # figure, tables and report of what is finished; 1: something failed
  local i key name folder paths code=0
  trap 'exit 130' INT TERM HUP
  mkdir -p runs/results && exec 8> runs/results/lock && flock 8 # two at a time would write the same files
  local -A files=() # of every block and label
  for i in "${todo[@]}"; do
    if ! same_flags "$i"; then # nor may an earlier figure's copy of it be shown
      rm -f "runs/results/${blocks[i]}/${envs[i]}"*"__${labels[i]}__s${names[i]##*__s}.csv"
    elif finished "$i"; then files[${blocks[i]} ${labels[i]}]+="runs/${names[i]}/agent.pt "; fi
  done
  for key in "${!files[@]}"; do
    read -ra paths <<< "${files[$key]}"
    folder=runs/results/${key% *}
    "$python" analysis/curves.py export "${paths[@]}" --out "$folder" --label "${key#* }" > /dev/null || code=1
  done
  for name in $(printf '%s\n' "${!files[@]}" | cut -d' ' -f1 | sort -u); do
    folder=runs/results/$name
    "$python" analysis/curves.py figure "$folder" --rnet-accuracy --claim "${claims[$name]}" &&
      "$python" analysis/report.py "$folder" --claim "${claims[$name]}" > /dev/null &&
      echo "figure, tables and report: $folder" || code=1
  done
  return $code
}
if [[ -n $slurm && " ${state[*]} " == *" left "* ]]; then
  command -v sbatch > /dev/null || die "--slurm needs sbatch on the PATH"
  for i in "${todo[@]}"; do # what an earlier array did not finish, so that a run that always fails is seen
    log=runs/${names[i]}/log.txt
    [[ ${state[$i]} == left && -e $log ]] || continue
    flock --nonblock --conflict-exit-code 75 "runs/${names[i]}/lock" true
    if (($? == 75)); then state[$i]=running # under Slurm or elsewhere
    elif stopped "$log"; then echo "stopped: $log" >&2
    else code=1; echo "failed: $log: $(last_words "$i")" >&2; fi
  done
  draw || code=1
  [[ " ${state[*]} " == *" left "* ]] || { echo "all that is left is running"; exit $code; }
  mkdir -p runs
  read -ra flags <<< "$sbatch"
  again="$block --engine $engine${seeds:+ --seeds $seeds}${steps:+ --steps $steps}${track:+ $track}"
  again+=" --python $(printf %q "$python")"
  size=$(scontrol show config 2> /dev/null | awk '$1 == "MaxArraySize" {print $3}')
  [[ $size =~ ^[0-9]+$ ]] || size=1001 # Slurm's default
  ((--size > 0)) || die "--slurm needs job arrays, but Slurm's MaxArraySize is $((size + 1)), accepted: 2 or more"
  # an array's numbers are below MaxArraySize, so `all` may need a second array
  # a task's number counts all runs of the block, whatever --only leaves. B: the signal goes to train, not to python.
  # exec: a shell before benchmark.sh would die of scancel and take python along before it has saved
  for ((first = 0; first < ${#names[@]}; first += size)); do
    tasks=$(for i in "${todo[@]}"; do
      [[ ${state[$i]} == left ]] && ((i >= first && i < first + size)) && echo $((i - first + 1))
    done | paste -sd,)
    [[ -n $tasks ]] || continue
    sbatch --job-name="sprl-$block" --array="$tasks" --requeue --open-mode=append --signal=B:USR1@120 --chdir="$PWD" \
      --output="runs/slurm-%A-%a.txt" ${flags[@]+"${flags[@]}"} \
      --wrap "exec ./benchmark.sh $again --task \$((SLURM_ARRAY_TASK_ID + $first))" || exit 1
  done
  echo "once it has ended, the same command makes the figure and the tables, or submits again what was not finished"
  exit $code
fi

# ALL RUNS ############################################################################################################
export PYTHONUNBUFFERED=1 # a log's last line must be the last that was said
((workers > 1)) && export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
step_of() { # the step that run i has reached, read off the progress bar in its log
  tail -c 4000 "runs/${names[$1]}/log.txt" 2> /dev/null | tr '\r' '\n' | awk '/^\$ / && !/--resume/ {n = 0}
    match($0, /[0-9]+\/[0-9]+ \[/) {n = substr($0, RSTART) + 0} END {print n + 0}'
}
declare -A pids=() base=() at=() # the runs that are running; the steps of every run when we started, and now
for i in "${todo[@]}"; do
  base[$i]=0; [[ ${state[$i]} == left && -e runs/${names[i]}/agent.pt ]] && base[$i]=$(step_of "$i")
  at[$i]=${base[$i]}
done
busy=0 last=$SECONDS shown='' shown_at=0 stopping='' every=600; [[ -t 1 ]] && every=5
progress() { # in place on a terminal; else a line when a number changes, and every ten minutes
  local i line left=0 longest=0 worked=0 minutes='' time=''
  local -A n=([left]=0 [running]=0 [finished]=0 [failed]=0 [elsewhere]=0 [other]=0)
  for i in "${todo[@]}"; do n[${state[$i]}]=$((n[${state[$i]}] + 1)); done
  line="$block: ${n[finished]} done, ${n[running]} running, $((n[failed] + n[other])) failed of ${#todo[@]}"
  [[ $line == "$shown" ]] && ((SECONDS - shown_at < every)) && return
  for i in "${todo[@]}"; do # work is counted in steps, so that a run resumed near its end counts little
    [[ ${state[$i]} == running ]] && at[$i]=$(step_of "$i")
    ((at[$i] < base[$i])) && base[$i]=${at[$i]} # its checkpoint was older than its log
    worked=$((worked + at[$i] - base[$i]))
    [[ ${state[$i]} == running || ${state[$i]} == left ]] || continue
    left=$((left + sizes[i] - at[$i])) longest=$((sizes[i] - at[$i] > longest ? sizes[i] - at[$i] : longest))
  done
  ((longest * workers > left)) && left=$((longest * workers)) # in the end workers idle while the last run goes on
  ((worked > 0 && left > 0)) && minutes=$((busy * left / worked / workers / 60 + 1)) &&
    time=", about $((minutes / 60)) h $((minutes % 60)) min left"
  [[ -n $stopping ]] && time=', saving'
  shown=$line shown_at=$SECONDS
  if [[ -t 1 ]]; then printf '\r%s\e[K' "$line${time/ 0 h/}"; else echo "$line${time/ 0 h/}"; fi
}
tick() { # waits a moment and takes note of the runs that have ended
  local pid i code
  sleep 0.5
  busy=$((busy + ${#pids[@]} * (SECONDS - last))) last=$SECONDS
  for pid in "${!pids[@]}"; do
    kill -0 "$pid" 2> /dev/null && continue
    wait "$pid"; code=$? i=${pids[$pid]}
    unset "pids[$pid]"
    if finished "$i"; then state[$i]=finished at[$i]=${sizes[i]}
    elif ((code == 75)); then state[$i]=elsewhere
    elif [[ -n $stopping ]]; then state[$i]=left
    else state[$i]=failed; fi
  done
  progress
}
stop() { local pid; stopping=1 shown=''; for pid in "${!pids[@]}"; do kill -TERM "$pid" 2> /dev/null; done; }
trap stop INT TERM HUP
for i in "${todo[@]}"; do
  [[ ${state[$i]} == left ]] || continue
  while ((${#pids[@]} >= workers)) && [[ -z $stopping ]]; do tick; done
  [[ -n $stopping ]] && break
  train "$i" &
  pids[$!]=$i state[$i]=running
  progress
done
[[ -n $stopping ]] && stop # once more, for a run that was just being started
while ((${#pids[@]})); do tick; done
[[ -t 1 ]] && echo

for i in "${todo[@]}"; do
  log=runs/${names[i]}/log.txt
  [[ ${state[$i]} == elsewhere ]] && finished "$i" && state[$i]=finished
  [[ ${state[$i]} == elsewhere ]] && code=1 && echo "another benchmark.sh is at it: $log" >&2
  [[ ${state[$i]} == failed ]] && code=1 && echo "failed: $log: $(last_words "$i")" >&2
done
[[ -n $stopping ]] && { echo "stopped; the same command again goes on"; exit 130; }

draw || code=1
exit $code
