#!/bin/bash
# Launches every run of one of the paper's figures, survives interruption, and ends with the figure, the tables, a report
# page and the paper's claim beside them.
#
#   ./benchmark.sh quick                                   a small PPO against SPRL, ten minutes on two cores
#   ./benchmark.sh minigrid --seeds 6 --workers 2          the paper's MiniGrid figure
#   ./benchmark.sh minigrid --only sprl,KeyDoors-7x7 --dry-run
#   ./benchmark.sh minigrid --with my_sprl.py              your copy of a script beside the five methods
#   ./benchmark.sh minigrid --slurm --sbatch "--partition=gpu --time=4:00:00 --mem=8G"
#
# --seeds N        seeds 1..N of every run (default: the paper's number for the block)
# --workers W      runs at a time (default: the number of cores; on a GPU give as many as fit it)
# --steps N        environment steps of every run (default: the block's); BLOCK then is BLOCK-N in all names below
# --only A,B       only the methods and environments named, where both are named those methods on those environments;
#                  an environment's name may be shortened
# --with A,B       paths of your own scripts, which run on every environment and seed of the block with their defaults;
#                  my_sprl.py is the method my_sprl. What is finished is not run again after a change: rename the script
# --engine E       of dmlab: deepmind_lab, its stand-in labmaze, or auto, deepmind_lab if it imports (default)
# --python PATH    the interpreter (default: .venv/bin/python if there is one, else python3)
# --track          mirror the charts to Weights & Biases
# --dry-run        print the commands, run nothing
# --slurm          submit an array job, a task per run (two for all); --sbatch "FLAGS" are handed to sbatch
#
# The block all is every block but quick and minigrid-paper.
# Started again, it skips what is finished and resumes what was killed. It refuses to go on with a run that was made with
# other flags. Two at a time do not start a run twice.
# Every line that --dry-run prints can be copied. A run NAME is BLOCK__ENV__METHOD__sSEED: its folder is runs/NAME, its
# output runs/NAME.log, its flags runs/NAME.json. Figures and tables go to runs/results/BLOCK (results/ is what we
# measured); there dmlab is called dmlab-ENGINE, for scores of the stand-in are not DeepMind Lab's.

# This file is the list of runs; analysis/launch.py reads it from its input and does the rest. Its lines:
#   block NAME SEEDS CLAIM                 what the paper says of the figure is the claim
#   env ID[:CONDITION] STEPS [FLAGS]       the condition is a part of the runs' names
#   run METHOD SCRIPT FLAGS                on every environment right above
here=$(dirname "$0")
python=python3
[[ -x $here/.venv/bin/python ]] && python=$here/.venv/bin/python

# MINIGRID ############################################################################################################
grids='env MiniGrid-FourRooms-7x7-v0 500000
env MiniGrid-FourRooms-11x11-v0 2000000
env MiniGrid-KeyDoors-7x7-v0 1000000
env MiniGrid-KeyDoors-11x11-v0 2000000'
figure_3='SPRL beats PPO, ECO, ICM and GT-Grid on all four tasks; the last three are near PPO at 7x7 (figure 3).'
grid='--learning-rate 0.003 --ent-coef 0.01'
memory='--memory-size 200 --memory-percentile 90 --positive-bias 5' # ECO's everywhere
# measured best on MiniGrid; the paper has 0.002 and 0.01, and the 90th percentile
grid_sprl="ppo_sprl_minigrid.py --cost-scale 0.01 $grid --negative-bias 20 --positive-bias 5"
grid_window='--k 2 --tolerance 1 --num-tolerance-samples 60 --cost-percentile 97'
# the paper's own settings, which learn little here
raw='--ent-coef 0.01 --encoding raw'
raw_rnet='--negative-bias 20 --rnet-triplets 15000 --rnet-learning-rate 0.0003 --rnet-batch-size 64'
minigrid="
block minigrid 6 $figure_3
$grids
run ppo ppo_sprl_minigrid.py --cost-scale 0 $grid
run sprl $grid_sprl $grid_window
# measured best; the paper has 0.001 for ECO, and for ICM 0.1 of a bonus that is not divided by its mean
run eco ppo_eco.py --bonus-scale 0.1 $grid --bonus-bias 0.5 --k 3 --negative-bias 20 $memory
run icm ppo_icm.py --bonus-scale 0.001 $grid
run gt-grid ppo_gtgrid.py --bonus-scale 0.01 $grid

block minigrid-paper 6 $figure_3
$grids
run ppo ppo_sprl_minigrid.py --cost-scale 0 --learning-rate 0.003 $raw
run sprl ppo_sprl_minigrid.py --cost-scale 0.002 --learning-rate 0.01 $raw --k 2 --tolerance 1 \
  --num-tolerance-samples 60 --cost-percentile 90 --positive-bias 5 $raw_rnet
run eco ppo_eco.py --bonus-scale 0.001 --learning-rate 0.003 $raw --bonus-bias 0.5 --k 3 $memory $raw_rnet
run icm ppo_icm.py --bonus-scale 0.001 --learning-rate 0.003 $raw # our weight: theirs is of another bonus
run gt-grid ppo_gtgrid.py --bonus-scale 0.01 --learning-rate 0.003 $raw

block quick 2 SPRL learns faster than PPO.
env MiniGrid-FourRooms-7x7-v0 250000
run ppo ppo_sprl_minigrid.py --cost-scale 0 $grid
run sprl $grid_sprl $grid_window
"
# The ablations' MiniGrid figures use one tolerance sample, k = 5 and a tolerance of 25, unlike the paper's table.
ablations="
block ablation-k 6 k = 5 is best of 3, 5 and 7 (figure 10).
$grids
run k3 $grid_sprl --k 3 --tolerance 25 --num-tolerance-samples 1
run k5 $grid_sprl --k 5 --tolerance 25 --num-tolerance-samples 1
run k7 $grid_sprl --k 7 --tolerance 25 --num-tolerance-samples 1

block ablation-tolerance 6 A tolerance of 25 is best of 10, 15, 25 and 50 (figure 12).
$grids
run tolerance10 $grid_sprl --k 5 --tolerance 10 --num-tolerance-samples 1
run tolerance15 $grid_sprl --k 5 --tolerance 15 --num-tolerance-samples 1
run tolerance25 $grid_sprl --k 5 --tolerance 25 --num-tolerance-samples 1
run tolerance50 $grid_sprl --k 5 --tolerance 50 --num-tolerance-samples 1

block ablation-stack 6 No stacking is best; the policy sees 0, 1 or 5 observations before the current one (figure 14).
$grids
run stack0 $grid_sprl --k 5 --tolerance 25 --num-tolerance-samples 1 --stack-observations 0
run stack1 $grid_sprl --k 5 --tolerance 25 --num-tolerance-samples 1 --stack-observations 1
run stack5 $grid_sprl --k 5 --tolerance 25 --num-tolerance-samples 1 --stack-observations 5

# Appendix B: the learned network against the true reachability
block gt-rnet 6 SPRL and GT-SPRL are alike, with the learned RNet even better on 7x7 tasks (figure 21).
$grids
run sprl $grid_sprl $grid_window --rnet learned
run gt-sprl $grid_sprl $grid_window --rnet oracle
"

# ATARI: A GPU EACH ###################################################################################################
flags='--learning-rate 0.0005 --ent-coef 0.01'
atari="
block atari 4 SPRL beats PPO, ECO and ICM on all games but Ms. Pacman; PPO and ICM stay at 0 in Montezuma (figure 5).
env MontezumaRevenge-v5 10000000
env Freeway-v5 10000000
env MsPacman-v5 10000000
env Gravitar-v5 10000000
env Seaquest-v5 10000000
env Hero-v5 10000000
run ppo ppo_sprl_atari.py --cost-scale 0 $flags
run sprl ppo_sprl_atari.py --cost-scale 0.05 $flags --k 12 --tolerance 1 --num-tolerance-samples 200 \
  --negative-bias 80 --positive-bias 5 --rnet-input pixel-difference
run eco ppo_eco.py --bonus-scale 0.001 --bonus-bias 0.5 $flags --k 12 --negative-bias 80 $memory
run icm ppo_icm.py --bonus-scale 0.001 $flags
env MontezumaRevenge-v5 10000000
run gt-grid ppo_gtgrid.py --bonus-scale 0.01 $flags --cell-size 16 # not in the paper
"

# DMLAB: A GPU EACH ###################################################################################################
# {engine} is what --engine says; such a block has it in its name
mazes='env explore_goal_locations_small 20000000 --engine {engine}
env explore_goal_locations_large 20000000 --engine {engine}
env explore_object_rewards_many 20000000 --engine {engine}'
sprl='ppo_sprl_dmlab.py --cost-scale 0.06 --cost-bias 0.5 --num-tolerance-samples 200'
sprl+=' --negative-bias 20 --positive-bias 5 --learning-rate 0.0003 --ent-coef 0.004 --max-grad-norm 10'
flags='--learning-rate 0.00025'
dmlab="
block dmlab-{engine} 4 SPRL is best on all three tasks, most so in goal locations large, and even above GT-Grid (figure 4).
$mazes
run ppo ppo_sprl_dmlab.py --cost-scale 0 --learning-rate 0.00019 --ent-coef 0.0011 --max-grad-norm 0.5
run sprl $sprl --k 10 --tolerance 1 --stack-observations 0
run eco ppo_eco.py --bonus-scale 0.03 --bonus-bias 0.5 --k 5 --negative-bias 20 $memory $flags \
  --ent-coef 0.0021
run icm ppo_icm.py --bonus-scale 0.001 $flags \
  --ent-coef 0.0042
run gt-grid ppo_gtgrid.py --bonus-scale 0.0525 --cell-size 30 $flags --ent-coef 0.0066

block dmlab-k-{engine} 4 k = 10 is best of 1, 3, 10 and 30 (figure 9).
$mazes
run k1 $sprl --k 1 --tolerance 1 --stack-observations 0
run k3 $sprl --k 3 --tolerance 1 --stack-observations 0
run k10 $sprl --k 10 --tolerance 1 --stack-observations 0
run k30 $sprl --k 30 --tolerance 1 --stack-observations 0

block dmlab-tolerance-{engine} 4 A tolerance of 1 is best of 1, 2, 3 and 5 (figure 11).
$mazes
run tolerance1 $sprl --k 10 --tolerance 1 --stack-observations 0
run tolerance2 $sprl --k 10 --tolerance 2 --stack-observations 0
run tolerance3 $sprl --k 10 --tolerance 3 --stack-observations 0
run tolerance5 $sprl --k 10 --tolerance 5 --stack-observations 0

block dmlab-stack-{engine} 4 No stacking is best; the policy sees 0, 1, 5 or 10 observations before the current one (figure 13).
$mazes
run stack0 $sprl --k 10 --tolerance 1 --stack-observations 0
run stack1 $sprl --k 10 --tolerance 1 --stack-observations 1
run stack5 $sprl --k 10 --tolerance 1 --stack-observations 5
run stack10 $sprl --k 10 --tolerance 1 --stack-observations 10
"

# FETCH ###############################################################################################################
# measured: with the paper's weight, 0.05, SPRL does not learn
flags='--learning-rate 0.0005 --ent-coef 0.001'
methods="run ppo ppo_sprl_fetch.py --cost-scale 0 --learning-rate 0.0005 --ent-coef 0.01
run sprl ppo_sprl_fetch.py --cost-scale 0.0005 --cost-bias 1 --k 10 --tolerance 1 --num-tolerance-samples 20 \
  --negative-bias 12 --positive-bias 5 $flags
run eco ppo_eco.py --bonus-scale 0.0001 --bonus-bias 1 --k 10 --negative-bias 12 $memory $flags
run icm ppo_icm.py --bonus-scale 0.001 $flags"
fetch="
block fetch 4 SPRL beats PPO, ECO and ICM on Push, Slide and PickAndPlace; on Reach all are alike (figure 6).
env FetchReach-v4 1000000 --action-noise 0.003
env FetchPush-v4 1000000 --action-noise 0.003
env FetchSlide-v4 1000000 --action-noise 0.003
env FetchPickAndPlace-v4 1000000 --action-noise 0.003
$methods

# fewer simulator steps per action: a longer way to the same goal
block fetch-sparsity 4 The sparser the reward, the fewer substeps, the further SPRL is ahead of the others (figure 15).
env FetchReach-v4:substeps2 1000000 --action-noise 0.003 --n-substeps 2
env FetchReach-v4:substeps3 1000000 --action-noise 0.003 --n-substeps 3
env FetchReach-v4:substeps4 1000000 --action-noise 0.003 --n-substeps 4
env FetchReach-v4:substeps6 1000000 --action-noise 0.003 --n-substeps 6
$methods

block fetch-noise 4 Noise on the actions costs SPRL the least (figure 16).
env FetchReach-v4:substeps3-noise0.03 1000000 --action-noise 0.03 --n-substeps 3
env FetchReach-v4:substeps3-noise0.1 1000000 --action-noise 0.1 --n-substeps 3
env FetchReach-v4:substeps3-noise0.3 1000000 --action-noise 0.3 --n-substeps 3
env FetchPush-v4:substeps8-noise0.03 1000000 --action-noise 0.03 --n-substeps 8
env FetchPush-v4:substeps8-noise0.1 1000000 --action-noise 0.1 --n-substeps 8
env FetchPush-v4:substeps8-noise0.3 1000000 --action-noise 0.3 --n-substeps 8
env FetchSlide-v4:substeps10-noise0.03 1000000 --action-noise 0.03 --n-substeps 10
env FetchSlide-v4:substeps10-noise0.1 1000000 --action-noise 0.1 --n-substeps 10
env FetchSlide-v4:substeps10-noise0.3 1000000 --action-noise 0.3 --n-substeps 10
env FetchPickAndPlace-v4:substeps10-noise0.03 1000000 --action-noise 0.03 --n-substeps 10
env FetchPickAndPlace-v4:substeps10-noise0.1 1000000 --action-noise 0.1 --n-substeps 10
env FetchPickAndPlace-v4:substeps10-noise0.3 1000000 --action-noise 0.3 --n-substeps 10
$methods
"

export PYTHONUNBUFFERED=1 # a log's last line must be the last that was said
exec "$python" "$here/analysis/launch.py" "$@" <<< "$minigrid$ablations$atari$dmlab$fetch"
