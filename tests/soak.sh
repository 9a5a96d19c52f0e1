#!/bin/bash
# Runs each script for a while and reports how its memory grows once the replay ring is full; not part of CI.
#
#   tests/soak.sh                                     all scripts, 30 minutes each, one after the other
#   tests/soak.sh --minutes 5 --only minigrid,icm     those with one of these words in their name
#
# --minutes N      how long each script runs (default: 30)
# --only A,B       only scripts whose name has one of these words in it
# --limit MB       the most that may be added between the ring's being full and the end (default: 30)
# --python PATH    the interpreter (default: .venv/bin/python if there is one, else python3)
#
# Memory is the resident size of the run and its workers, sampled once a second; "before" and "after" are means of the
# first and the last fifth of the samples that were taken with a full ring. The limit leaves room for the history, a row
# per iteration, and for what the allocator keeps. Exit code 1: one grew by more, ended early or never filled its ring.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
minutes=30 only='' limit=30 python=$root/.venv/bin/python
[[ -x $python ]] || python=python3
while (($#)); do
  case $1 in
    --minutes | --only | --limit | --python) [[ -n ${2:-} ]] || { echo "soak.sh: $1 wants a value" >&2; exit 2; } ;;&
    --minutes | --limit) [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "soak.sh: $1 $2, accepted: 1, 2, ..." >&2; exit 2; } ;;&
    --minutes) minutes=$2 ;;
    --only) only=$2 ;;
    --limit) limit=$2 ;;
    --python) python=$2 && [[ $2 == */* ]] && python=$(realpath -s "$2") ;;
    *) echo "soak.sh: unknown $1, accepted: --minutes, --only, --limit, --python" >&2; exit 2 ;;
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

folder=$(mktemp -d) && cd "$folder" || exit 2
pid='' failed=0 rows=()
trap '[[ -n $pid ]] && kill -9 "$pid" 2>/dev/null; ((failed)) && echo "logs: $folder" || rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
for path in "$root"/ppo_*.py; do
  script=$(basename "$path")
  [[ -z $only || $script =~ ${only//,/|} ]] || continue
  # shellcheck disable=SC2046,SC2086 # flags are words
  "$python" "$path" $small $(flags "$script") --total-timesteps 1000000000 --checkpoint-interval 20000 \
    --run-name soak >"$script.out" 2>"$script.err" &
  pid=$! begin=$SECONDS
  : >"$script.samples"
  while ((SECONDS - begin < 60 * minutes)) && kill -0 "$pid" 2>/dev/null; do
    step=$(tail -c 400 "$script.err" | tr '\r' '\n' | grep -oE '[0-9]+/[0-9]{8,}' | tail -1 | cut -d/ -f1)
    rss=$(ps -o rss= -p "$pid" --ppid "$pid" | awk '{sum += $1} END {print int(sum / 1024)}')
    echo "${step:-0} $rss" >>"$script.samples"
    printf '\r%-22s %4d of %d s, step %s, %s MB   ' "$script" $((SECONDS - begin)) $((60 * minutes)) "${step:-0}" "$rss" >&2
    sleep 1
  done
  kill -TERM "$pid" 2>/dev/null
  wait "$pid"
  status=$? pid=''
  printf '\r%70s\r' '' >&2
  row=$(awk -v ring=$ring -v limit="$limit" -v status=$status '
    $1 >= 2 * ring && $2 > 0 {mb[n++] = $2; last = $1}
    END {
      if (status) {print "- - - - ended with exit code " status; exit}
      if (n < 15) {print "- - - - too short: the ring was not full for long enough"; exit}
      part = int(n / 5)
      for (i = 0; i < part; i++) {before += mb[i] / part; after += mb[n - 1 - i] / part}
      verdict = after - before > limit ? "GROWS" : "flat"
      printf "%d %.0f %.0f %+.1f %s\n", last, before, after, after - before, verdict
    }' "$script.samples")
  rows+=("$script $row")
  [[ $row == *flat ]] || failed=1
  rm -rf runs
done
((${#rows[@]})) || { echo "soak.sh: --only $only names no script" >&2; exit 2; }

printf '%-22s %10s %10s %10s %10s  %s\n' script steps 'before MB' 'after MB' 'growth MB' "verdict (limit $limit MB)"
for row in "${rows[@]}"; do
  read -r script steps before after growth verdict <<<"$row"
  printf '%-22s %10s %10s %10s %10s  %s\n' "$script" "$steps" "$before" "$after" "$growth" "$verdict"
done
exit $failed
