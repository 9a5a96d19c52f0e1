"""Scores of runs and how sure they are (Agarwal et al. 2021, Deep RL at the Edge of the Statistical Precipice).

    python analysis/report.py results/minigrid                                  # uses it for scores.md and scores.csv
    python -c "import sys; sys.path.append('analysis'); import scores; print(scores.iqm([1, 2, 3, 9]))"

It differs from their library rliable in this: tasks may have different numbers of seeds, and one with more then weighs
more in a pooled mean, which is left out where methods would differ in that; a single seed has no interval.
"""

import numpy as np
from curves import common_steps, mean_and_error, mean_between, points

ALL = "all tasks"  # in the place of the environment in rows that pool tasks


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
    as there are. None if a method has a single seed somewhere, from which only itself could be drawn."""
    if any(len(seeds) < 2 for tasks in methods for seeds in tasks):
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
    method's final return, and None where that is not positive: nothing has been learned that could be timed."""
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
        goal = threshold if threshold is not None else 0.8 * best if best > 0 else None
        for method, seeds in by_method.items():
            curves = [points(run, "return") for run in seeds if goal is not None]
            by_score[method]["steps_to"] = np.array([steps_to(*curve, goal, last) for curve in curves])
        scores[env_id] = last, goal, by_score
    return scores


def estimates(method, baseline, has_iqm=True):
    """Interquartile mean (unless not wanted) and probability of improvement of both scores with intervals; one
    {score: array} per task, baseline None for the baseline itself."""
    row = {}
    for score in ("final", "auc"):
        tasks, found = [task[score] for task in method], {"iqm": (None, None), "improvement": (None, None)}
        if has_iqm:
            found["iqm"] = pooled_iqm(tasks), interval(pooled_iqm, tasks)
        if baseline:
            others = [task[score] for task in baseline]
            found["improvement"] = improvement(tasks, others), interval(improvement, tasks, others)
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


def make_scores(runs, baseline="ppo", threshold=None):
    """Rows of the table, one per task and method, then one over all tasks per method that has run on all of them; None
    where there is no number. Also whether these last are of scaled returns: they are unless all lie in [-1, 1]."""
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
            other = by_score.get(baseline) if method != baseline else None
            rows.append(row | estimates([found], [other] if other else None))
    tasks = [by_score for _, _, by_score in scores.values()]
    methods = [method for method in tasks[0] if all(method in by_score for by_score in tasks)]
    shared = [{method: by_score[method] for method in methods} for by_score in tasks if methods]
    scaled = any(abs(found["final"]).max() > 1 for by_score in shared for found in by_score.values())
    shared = [common_scale(by_score) if scaled else by_score for by_score in shared]
    # the tasks' weights in the pool must be the same ones for every method
    alike = len({tuple(len(by_score[method]["final"]) for by_score in shared) for method in methods}) == 1
    for method in methods if len(shared) > 1 and (alike or baseline in methods) else ():
        tasks, others = ([by_score.get(name) for by_score in shared] for name in (method, baseline))
        seeds = sum(len(task["final"]) for task in tasks)
        has_other = method != baseline and baseline in methods
        row = {"env": ALL, "method": method, "seeds": seeds, "tasks": len(shared)}
        rows.append(row | estimates(tasks, others if has_other else None, alike))
    return rows, scaled
