#!/bin/bash
# Runs each script for a while and reports how its memory grows once the replay ring is full; not part of CI.
#
#   tests/soak.sh                                     all scripts, 30 minutes each, one after the other
#   tests/soak.sh --workers 7                         all at the same time
#   tests/soak.sh --minutes 5 --only minigrid,icm     those with one of these words in their name
#
# --minutes N      how long each script runs (default: 30)
# --workers N      scripts that run at the same time (default: 1)
# --only A,B       only scripts whose name has one of these words in it
# --limit MB       the most that may be added between the ring's being full and the end (default: 30)
# --python PATH    the interpreter (default: .venv/bin/python if there is one, else python3)
#
# Memory is the resident size of the run and its workers, sampled once a second; "before" and "after" are the least of the
# first and of the last fifth of the samples that were taken with a full ring: what comes and goes is not in it. The limit
# leaves room for the history, a row per iteration, and for what the allocator keeps. Exit code 1: one grew by more, ended
# early or never filled its ring.
set -uo pipefail
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # many small runs at a time must not fight for the cores
# on the CPU oneDNN keeps the code of up to 1024 convolutions, one for each size of batch: memory grows by tens of MB until
# it has them all, which would hide a leak
export ONEDNN_PRIMITIVE_CACHE_CAPACITY=${ONEDNN_PRIMITIVE_CACHE_CAPACITY:-64}
# what is freed goes back at once: else the allocator keeps up to 200 MB of it, more or less at every look
export MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536
root=$(cd "$(dirname "$0")/.." && pwd)
minutes=30 workers=1 only='' limit=30 python=$root/.venv/bin/python
[[ -x $python ]] || python=python3
while (($#)); do
  case $1 in
    --minutes | --workers | --only | --limit | --python) [[ -n ${2:-} ]] || { echo "soak.sh: $1 wants a value" >&2; exit 2; } ;;&
    --minutes | --workers | --limit) [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "soak.sh: $1 $2, accepted: 1, 2, ..." >&2; exit 2; } ;;&
    --minutes) minutes=$2 ;;
    --workers) workers=$2 ;;
    --only) only=$2 ;;
    --limit) limit=$2 ;;
    --python) python=$2 && [[ $2 == */* ]] && python=$(realpath -s "$2") ;;
    *) echo "soak.sh: unknown $1, accepted: --minutes, --workers, --only, --limit, --python" >&2; exit 2 ;;
  esac
  shift 2
done

small="--num-envs 4 --num-steps 64" ring=2000 # so small that it is full after a fraction of a minute
learns="--ring-size $ring --rnet-start 1000 --rnet-intervals 1000 1000 1000 --heldout-pairs 1000 --rnet-triplets 500"
flags() { # of a script, besides those of all
  case $1 in
    ppo_sprl_atari.py) echo "$learns --env-id Freeway-v5 --rnet-width 16 --rnet-input embedding-difference" ;;
    ppo_sprl_dmlab.py) echo "$learns --rnet-width 16 --num-tolerance-samples 60" ;;
    ppo_sprl_* | ppo_eco.py) echo "$learns" ;;
  esac
}

soak() { # one script; its verdict goes to SCRIPT.row
  local script=$1 pid step rss status begin=$SECONDS
  trap 'kill -9 "$pid" 2>/dev/null' EXIT
  trap 'exit 130' INT TERM
  # shellcheck disable=SC2046,SC2086 # flags are words
  "$python" "$root/$script" $small $(flags "$script") --total-timesteps 1000000000 --checkpoint-interval 20000 \
    --run-name "$script" >"$script.out" 2>"$script.err" &
  pid=$!
  : >>"$script.err"
  while ((SECONDS - begin < 60 * minutes)) && kill -0 "$pid" 2>/dev/null; do
    step=$(tail -c 400 "$script.err" | tr '\r' '\n' | grep -oE '[0-9]+/[0-9]{8,}' | tail -1 | cut -d/ -f1)
    rss=$(ps -o rss= -p "$pid" --ppid "$pid" | awk '{sum += $1} END {print int(sum / 1024)}')
    echo "${step:-0} $rss" >>"$script.samples"
    ((workers == 1)) && printf '\r%-22s %4d of %d s, step %s, %s MB   ' "$script" $((SECONDS - begin)) \
      $((60 * minutes)) "${step:-0}" "$rss" >&2
    sleep 1
  done
  kill -TERM "$pid" 2>/dev/null
  wait "$pid"
  status=$?
  printf '\r%-70s\n' "$script has run for $((SECONDS - begin)) s" >&2
  awk -v ring=$ring -v limit="$limit" -v status=$status '
    $1 >= 2 * ring && $2 > 0 {mb[n++] = $2; last = $1}
    END {
      if (status) {print "- - - - ended with exit code " status; exit}
      if (n < 15) {print "- - - - too short: the ring was not full for long enough"; exit}
      part = int(n / 5)
      before = mb[0]; after = mb[n - 1]
      for (i = 0; i < part; i++) {
        if (mb[i] < before) before = mb[i]
        if (mb[n - 1 - i] < after) after = mb[n - 1 - i]
      }
      verdict = after - before > limit ? "GROWS" : "flat"
      printf "%d %d %d %+d %s\n", last, before, after, after - before, verdict
    }' "$script.samples" >"$script.row"
}

scripts=()
for path in "$root"/ppo_*.py; do
  [[ -n $only && ! ${path##*/} =~ ${only//,/|} ]] || scripts+=("${path##*/}")
done
((${#scripts[@]})) || { echo "soak.sh: --only $only names no script" >&2; exit 2; }
folder=$(mktemp -d) && cd "$folder" || exit 2
failed=1
trap 'kill $(jobs -p) 2>/dev/null; wait; ((failed)) && echo "logs: $folder" || rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
for script in "${scripts[@]}"; do
  (($(jobs -pr | wc -l) < workers)) || wait -n
  soak "$script" &
done
wait

failed=0
printf '%-22s %10s %10s %10s %10s  %s\n' script steps 'before MB' 'after MB' 'growth MB' "verdict (limit $limit MB)"
for script in "${scripts[@]}"; do
  read -r steps before after growth verdict <"$script.row"
  printf '%-22s %10s %10s %10s %10s  %s\n' "$script" "$steps" "$before" "$after" "$growth" "$verdict"
  [[ $verdict == flat ]] || failed=1
done
exit $failed
