"""Scores of runs and how sure they are (Agarwal et al. 2021, Deep RL at the Edge of the Statistical Precipice).

    python analysis/report.py results/minigrid                                  # uses it for scores.md and scores.csv
    python -c "import sys; sys.path.append('analysis'); import scores; print(scores.iqm([1, 2, 3, 9]))"

It differs from their library rliable in this: tasks and methods may have different numbers of seeds. Fewer than three
have no interval; tasks are pooled over the methods that have three seeds or more on all of them, each with as many
seeds as the smallest of these numbers, so that every task weighs the same.
"""

import numpy as np
from curves import common_steps, mean_and_error, mean_between, points

ALL = "all tasks"  # in the place of the environment in rows that pool tasks
MIN_SEEDS = 3  # of an interval: that of two is the range between them and holds the true mean in half of the cases


# STATISTICS ##########################################################################################################
def iqm(values):
    """Interquartile mean over the last axis. Where n / 4 is not whole, floor(n / 4) values are cut at either end, as
    scipy.stats.trim_mean does, which rliable calls: 1 and 1 of 6, none of 3."""
    values = np.sort(values, -1)
    cut = values.shape[-1] // 4
    return values[..., cut : values.shape[-1] - cut].mean(-1)


def pooled_iqm(tasks):
    """Interquartile mean of the runs of all tasks; one array (..., seeds) per task."""
    return iqm(np.concatenate(tasks, -1))


def improvement(tasks_x, tasks_y):
    """Probability that a run of X beats a run of Y, a tie counts half, averaged over the tasks."""
    chances = []
    for x, y in zip(tasks_x, tasks_y):
        x, y = np.asarray(x)[..., :, None], np.asarray(y)[..., None, :]
        chances.append(((x > y) + 0.5 * (x == y)).mean((-2, -1)))
    return np.mean(chances, 0)


def interval(statistic, *methods, reps=10_000):
    """95 % percentile interval of the stratified bootstrap: in every method and task the seeds are drawn anew, as many
    as there are. None if a method has too few seeds somewhere."""
    if any(len(seeds) < MIN_SEEDS for tasks in methods for seeds in tasks):
        return None
    rng = np.random.default_rng(0)  # the same runs always give the same interval
    drawn = [[seeds[rng.integers(len(seeds), size=(reps, len(seeds)))] for seeds in tasks] for tasks in methods]
    return np.percentile(statistic(*drawn), [2.5, 97.5])


def steps_to(steps, values, threshold, last, window=0.05):
    """The first logged step at which the mean return over the 5 % of the training before it is at the threshold,
    infinite if there is none: a single row of few episodes would pass by luck, so the first rows cannot."""
    rows = steps[(steps <= last) & (steps - window * last >= steps[0])]
    means = (mean_between(steps, values, step - window * last, step) for step in rows)
    return next((float(step) for step, mean in zip(rows, means) if mean >= threshold), np.inf)


# TABLE ###############################################################################################################
def run_scores(runs, threshold=None):
    """{env: (steps, threshold, {method: {score: array over seeds}})}. The threshold's default is 80 % of the best
    method's final return, and None where that is not above twice what all began with, in the first 5 % of the steps, or
    not positive: little has been learned that could be timed."""
    scores = {}
    for env_id, by_method in runs.items():
        last, by_score = common_steps(env_id, by_method), {}
        for method, seeds in by_method.items():
            curves = [points(run, "return") for run in seeds]
            by_score[method] = {
                "final": np.array([mean_between(*curve, 0.9 * last, last) for curve in curves]),
                "auc": np.array([mean_between(*curve, 0, last) for curve in curves]),
            }
        best = max(found["final"].mean() for found in by_score.values())
        every_curve = [points(run, "return") for seeds in by_method.values() for run in seeds]
        start = np.mean([mean_between(*curve, 0, 0.05 * last) for curve in every_curve])
        goal = threshold if threshold is not None else 0.8 * best if best > max(0, 2 * start) else None
        for method, seeds in by_method.items():
            curves = [points(run, "return") for run in seeds if goal is not None]
            by_score[method]["steps_to"] = np.array([steps_to(*curve, goal, last) for curve in curves])
        scores[env_id] = last, goal, by_score
    return scores


def estimates(method, baselines):
    """Interquartile mean of both scores, and probability of improvement over every baseline, with intervals; one
    {score: array} per task, of a baseline None if there is nothing to compare. One run against another is no
    probability."""
    row = {}
    for score in ("final", "auc"):
        tasks = [task[score] for task in method]
        found = {"iqm": (pooled_iqm(tasks), interval(pooled_iqm, tasks))}
        for label, baseline in baselines.items():
            others, name = [task[score] for task in baseline or ()], f"improvement_{label}"
            found[name] = None, None
            if others and min(map(len, tasks + others)) > 1:
                found[name] = improvement(tasks, others), interval(improvement, tasks, others)
        for name, (value, bounds) in found.items():
            low, high = (None, None) if bounds is None else bounds
            row |= {f"{score}_{name}": value, f"{score}_{name}_low": low, f"{score}_{name}_high": high}
    return row


def common_scale(by_score):
    """Scores of one task from 0, its worst run, to 1, its best."""
    scaled = {method: {} for method in by_score}
    for score in ("final", "auc"):
        values = np.concatenate([found[score] for found in by_score.values()])
        for method, found in by_score.items():
            scaled[method][score] = (found[score] - values.min()) / (np.ptp(values) or 1)
    return scaled


def make_scores(runs, baselines=("ppo",), threshold=None):
    """Rows of the table, one per task and method, then one over all tasks per method that has enough seeds of each;
    None where there is no number. Also whether these last are of scaled returns: they are unless all lie in [-1, 1]."""
    scores, rows = run_scores(runs, threshold), []
    for env_id, (last, goal, by_score) in scores.items():
        for method, found in by_score.items():
            row = {"env": env_id, "method": method, "seeds": len(found["final"]), "steps": last, "threshold": goal}
            for score, name in (("final", "final_return"), ("auc", "auc")):
                mean, error = mean_and_error(found[score])
                row |= {name: mean, f"{name}_se": None if np.isnan(error) else error}
            middle = np.inf if goal is None else np.median(found["steps_to"])  # infinite unless most seeds get there
            row["steps_to"] = None if np.isinf(middle) else int(middle)
            row["reached"] = int(np.isfinite(found["steps_to"]).sum())
            others = {b: [by_score[b]] if b in by_score and b != method else None for b in baselines}
            rows.append(row | estimates([found], others))
    tasks = [by_score for _, _, by_score in scores.values()]
    methods = [m for m in tasks[0] if all(m in task and len(task[m]["final"]) >= MIN_SEEDS for task in tasks)]
    seeds = min((len(task[method]["final"]) for task in tasks for method in methods), default=0)
    shared = [{m: {name: task[m][name][:seeds] for name in ("final", "auc")} for m in methods} for task in tasks]
    scaled = any(abs(found["final"]).max() > 1 for task in shared for found in task.values())
    shared = [common_scale(task) if scaled else task for task in shared]
    for method in methods if min(len(shared), len(methods)) > 1 else ():
        others = {b: [task[b] for task in shared] if b in methods and b != method else None for b in baselines}
        row = {"env": ALL, "method": method, "seeds": seeds * len(shared), "tasks": len(shared)}
        rows.append(row | estimates([task[method] for task in shared], others))
    return rows, scaled
