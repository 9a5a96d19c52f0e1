"""analysis/scores.py and report.py: statistics against sums by hand and slow loops, the page against its own data."""

import csv
import html
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "analysis"))

import curves  # noqa: E402
import report  # noqa: E402
import scores  # noqa: E402


def write_csv(folder, name, rows, comments=None, **columns):
    """A run whose curve goes through (step, return); other columns are constant."""
    history = [{"step": step, "return": value, **columns} for step, value in rows]
    curves.write_run(
        Path(folder, f"{name}.csv"), history, comments or {"command": "python x.py", "commit": "c0", "elapsed_s": 7}
    )


# STATISTICS ##########################################################################################################
def test_interquartile_mean_by_hand():
    """Like scipy's trim_mean, int(0.25 n) values fall away at either end, and no value counts in part."""
    assert scores.iqm([9.0, 1.0, 2.0, 4.0]) == 3  # of 2 and 4
    assert scores.iqm(np.arange(20)) == 9.5  # of 5 to 14
    assert scores.iqm([0, 1, 2, 3, 4, 100]) == 2.5  # 1 of 6 cut: of 1 to 4; with parts of a value it would be 2.83
    assert scores.iqm([0, 1, 8]) == 3  # nothing to cut of 3
    assert scores.iqm([7.0]) == 7
    np.testing.assert_array_equal(scores.iqm([[4, 1, 9, 2], [0, 0, 2, 8]]), [3, 1])
    values = np.random.default_rng(0).normal(size=37)
    kept = sorted(values)[int(0.25 * 37) : -int(0.25 * 37)]
    assert scores.iqm(values) == pytest.approx(sum(kept) / len(kept))
    assert scores.pooled_iqm([np.array([1.0, 9.0]), np.array([2.0, 4.0])]) == 3  # of all runs, not of tasks' means


def test_improvement_against_a_double_loop():
    assert scores.improvement([[1, 2]], [[0, 2]]) == 0.625  # wins 1, 0, 1 and a half
    assert scores.improvement([[1, 2], [5]], [[0, 2], [1, 1, 1]]) == 0.8125  # tasks weigh the same
    assert scores.improvement([[3, 3]], [[3, 3, 3]]) == 0.5
    rng = np.random.default_rng(1)
    xs, ys = ([rng.integers(0, 4, n).astype(float) for n in sizes] for sizes in ((6, 3), (2, 5)))
    slow = []
    for x, y in zip(xs, ys):
        wins = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in x for b in y)
        slow.append(wins / len(x) / len(y))
    assert scores.improvement(xs, ys) == pytest.approx(np.mean(slow))
    assert scores.improvement(ys, xs) == pytest.approx(1 - np.mean(slow))
    stack = [np.stack([x, x[::-1]]) for x in xs]  # the bootstrap asks about many draws at once
    np.testing.assert_allclose(scores.improvement(stack, [np.stack([y, y]) for y in ys]), np.mean(slow))


def every_draw(seeds):
    return [np.array(draw) for draw in itertools.product(seeds, repeat=len(seeds))]


def exact_interval(values):
    """The least values that 2.5 % and 97.5 % of all draws do not exceed."""
    return tuple(np.percentile(values, [2.5, 97.5], method="inverted_cdf"))


def test_bootstrap_against_all_draws():
    """Two tasks of 3 seeds have 27 x 27 draws, each as likely as another; of the other method 27 more."""
    x = [np.array([0.0, 1.0, 1.0]), np.array([2.0, 5.0, 9.0])]
    exact = [scores.pooled_iqm(draw) for draw in itertools.product(*map(every_draw, x))]
    assert len(exact) == 729
    drawn = []
    low, high = scores.interval(lambda tasks: drawn.append(scores.pooled_iqm(tasks)) or drawn[0], x, reps=100_000)
    for value in np.unique(np.round(exact, 9)):  # the whole distribution, not only its ends
        share = np.isclose(exact, value).mean()
        assert np.isclose(drawn[0], value).mean() == pytest.approx(share, abs=0.006)
    np.testing.assert_allclose((low, high), exact_interval(exact))
    y = [np.array([0.5, 4.0, 4.0])]
    exact = [scores.improvement([a], [b]) for a in every_draw(x[1]) for b in every_draw(y[0])]
    low, high = scores.interval(scores.improvement, [x[1]], y)
    np.testing.assert_allclose((low, high), exact_interval(exact))
    assert low < high == 1
    assert scores.interval(scores.improvement, [x[1]], [np.array([0.5])]) is None  # one seed: nothing to draw
    assert scores.interval(scores.pooled_iqm, [x[0], np.array([1.0, 2.0])]) is None  # two: only the range between them
    assert tuple(scores.interval(scores.pooled_iqm, x)) == tuple(scores.interval(scores.pooled_iqm, x))


def test_bootstrap_covers():
    """Of intervals from 4 tasks x 10 normal seeds, about 93 % hold the true mean; a percentile interval is a bit short:
    sqrt(9 / 10) of the right width, that is 1.86 standard errors, or 93.7 %. Of 3 and of 6 seeds of one task as many as
    the notes say."""
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(300):
        tasks = list(rng.normal(size=(4, 10)) + np.array([[0], [10], [20], [30]]))
        low, high = scores.interval(lambda drawn: np.mean([task.mean(-1) for task in drawn], 0), tasks, reps=400)
        held += low < 15 < high
    assert 0.89 < held / 300 < 0.97
    for seeds, least, most in ((3, 0.70, 0.80), (6, 0.86, 0.94)):
        bounds = [scores.interval(scores.pooled_iqm, [rng.normal(size=seeds)], reps=400) for _ in range(500)]
        assert least < np.mean([low <= 0 <= high for low, high in bounds]) < most


def test_steps_to_a_threshold():
    steps, values = np.array([10.0, 20.0, 30.0, 40.0, 100.0]), np.array([0.0, 1.0, 0.0, 1.0, 1.0])
    assert scores.steps_to(steps, values, 0.7, 100) == 20  # mean of the 5 steps before: (0.5 + 1) / 2
    assert scores.steps_to(steps, values, 0.8, 100) == 100  # at 40 it is 0.75 as well
    assert scores.steps_to(steps, values, 0.8, 100, window=0) == 20
    assert scores.steps_to(steps, values, 0.8, 40) == 20  # the window is 2 steps: 0.9
    assert scores.steps_to(steps, values, 0.8, 99) == np.inf  # what comes after the cut does not count
    assert scores.steps_to(steps, values, 1.1, 100) == np.inf
    assert scores.steps_to(steps, values, 0.0, 100) == 20  # at 10 there are no 5 steps before
    assert scores.steps_to(steps, np.array([1.0, 0.0, 0.0, 0.0, 0.0]), 0.4, 100) == np.inf  # luck in the first row


def test_chance_is_not_timed(tmp_path):
    """A method that ends at 1.2 where all began at 1 has learned nothing to be timed; one that ends at 5 has."""
    write_csv(tmp_path, "Maze__ppo__s1", [(1, 1.0), (50, 1.0), (100, 1.2)])
    (row,), _ = scores.make_scores(curves.read_folder(tmp_path))
    assert row["threshold"] is None and row["steps_to"] is None
    write_csv(tmp_path, "Maze__sprl__s1", [(1, 1.0), (50, 5.0), (100, 5.0)])
    (row, _), _ = scores.make_scores(curves.read_folder(tmp_path))
    assert row["threshold"] == 4 and row["steps_to"] == 50  # at 50 the mean over 45 to 50 is 4.8


def test_nothing_learned_is_not_timed(tmp_path):
    for seed in (1, 2):
        write_csv(tmp_path, f"Maze__ppo__s{seed}", [(50, 0.0), (100, 0.0)])
    (row,), _ = scores.make_scores(curves.read_folder(tmp_path))
    assert row["threshold"] is None and row["steps_to"] is None and row["reached"] == 0
    report.main(report.Args(str(tmp_path), claim="Mazes are <hard>."))
    text, page = (Path(tmp_path, name).read_text(encoding="utf-8") for name in ("scores.md", "report.html"))
    assert "100 steps, no threshold." in text and "| PPO | 2 | 0.000 ± 0.000 | 0.000 ± 0.000 | – |" in text
    assert text.startswith("The paper's claim: Mazes are &lt;hard&gt;.\n")
    assert "<p>The paper's claim: Mazes are &lt;hard&gt;.</p>" in page


def test_a_bonus_is_a_curve_of_the_page(tmp_path):
    """Columns that only some runs have: PPO has none of ICM's."""
    write_csv(tmp_path, "Maze__icm__s1", [(50, 0.5), (100, 0.5)], **{"icm/bonus": 0.25})
    write_csv(tmp_path, "Maze__ppo__s1", [(50, 0.5), (100, 0.5)])
    runs = curves.read_folder(tmp_path)
    data = report.page_data(runs, curves.method_styles({"ppo", "icm"}))
    assert [metric["id"] for metric in data["metrics"]] == ["return", "icm/bonus"]
    ppo, icm = data["tasks"][0]["icm/bonus"]
    assert ppo is None and icm["v"] == [[250] * report.POINTS] and icm["d"] == 3


@pytest.fixture
def folder(tmp_path):
    """Constant curves, whose final return and area are their height. On Maze-7 PPO has 0.1, 0.2, 0.3, 0.4 and SPRL 0.3,
    0.5, 0.4; on Maze-11 three times 0.1 and 0.7, 0.9, 0.8."""
    heights = {("Maze-7-v0", "ppo"): (0.1, 0.2, 0.3, 0.4), ("Maze-7-v0", "sprl"): (0.3, 0.5, 0.4)}
    heights |= {("Maze-11-v0", "ppo"): (0.1, 0.1, 0.1), ("Maze-11-v0", "sprl"): (0.7, 0.9, 0.8)}
    for (env_id, method), values in heights.items():
        for seed, value in enumerate(values, 1):
            write_csv(tmp_path, f"{env_id}__{method}__s{seed}", [(50, value), (100, value)], success=value)
    return tmp_path


def test_table_by_hand(folder, capsys):
    report.main(report.Args(str(folder), threshold=0.45))
    assert not capsys.readouterr().err
    rows = {(row["env"], row["method"]): row for row in csv.DictReader((folder / "scores.csv").open())}
    sprl, ppo = rows["Maze-7-v0", "sprl"], rows["Maze-7-v0", "ppo"]
    assert sprl["final_return"] == sprl["auc"] == "0.4" and sprl["final_return_se"] == "0.0577"  # 0.1 / sqrt(3)
    assert (sprl["steps_to"], sprl["reached"], sprl["threshold"]) == (
        "",
        "1",
        "0.45",
    )  # the median of 100 and two never
    assert (rows["Maze-11-v0", "sprl"]["steps_to"], rows["Maze-11-v0", "sprl"]["reached"]) == ("100", "3")
    assert ppo["final_iqm"] == "0.25" and ppo["final_improvement_ppo"] == ""
    assert sprl["final_improvement_ppo"] == "0.8333"  # 0.3 has 2.5 of four, 0.5 all, 0.4 has 3.5: 10 of 12
    text = (folder / "scores.md").read_text(encoding="utf-8")
    assert "| SPRL | 3 | 0.400 ± 0.058 | 0.400 ± 0.058 | > 100 (1 of 3) | 0.400 [0.300, 0.500] |" in text
    assert "P(better than PPO), area |" in text and "than SPRL" not in text  # that is 1 - what PPO's column says
    with Image.open(folder / "scores.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(image.width * image.height)}
    assert {(0xD5, 0x5E, 0x00), (0x00, 0x72, 0xB2)} <= colours


def test_pool_by_hand(folder):
    """Of PPO's four seeds on Maze-7 the first three count, for that is what the others have."""
    report.main(report.Args(str(folder)))
    rows = {row["method"]: row for row in csv.DictReader((folder / "scores.csv").open()) if row["env"] == "all tasks"}
    assert {(row["seeds"], row["tasks"]) for row in rows.values()} == {("6", "2")}
    assert rows["sprl"]["final_iqm"] == "0.6"  # of 0.4, 0.5, 0.7, 0.8
    assert rows["ppo"]["final_iqm"] == "0.125"  # of 0.1, 0.1, 0.1, 0.2
    assert rows["sprl"]["final_improvement_ppo"] == "0.9722"  # (8.5 / 9 + 1) / 2
    assert rows["ppo"]["final_improvement_ppo"] == ""  # it is not compared with itself
    low, high = float(rows["sprl"]["final_iqm_low"]), float(rows["sprl"]["final_iqm_high"])
    draws = itertools.product(every_draw([0.3, 0.5, 0.4]), every_draw([0.7, 0.9, 0.8]))
    exact = exact_interval([scores.pooled_iqm(draw) for draw in draws])
    np.testing.assert_allclose((low, high), exact, atol=1e-4)  # the file has four digits
    assert "All tasks: seeds 1 to 3 of the methods" in (folder / "scores.md").read_text(encoding="utf-8")
    (folder / "Maze-11-v0__sprl__s3.csv").unlink()
    report.main(report.Args(str(folder)))
    assert "All tasks" not in (folder / "scores.md").read_text(encoding="utf-8"), "two seeds are too few to pool"


def test_your_method_against_ppo_and_sprl(folder):
    """A third method is compared with both, by hand: 0.35 beats 3 of PPO's and 1 of SPRL's, 0.45 all 4 and 2 of 3."""
    for seed, value in enumerate((0.35, 0.45, 0.45), 1):
        write_csv(folder, f"Maze-7-v0__my_sprl__s{seed}", [(50, value), (100, value)])
    report.main(report.Args(str(folder)))
    rows = {row["method"]: row for row in csv.DictReader((folder / "scores.csv").open()) if row["env"] == "Maze-7-v0"}
    found = {name: (row["final_improvement_ppo"], row["auc_improvement_sprl"]) for name, row in rows.items()}
    assert found == {"sprl": ("0.8333", ""), "ppo": ("", "0.1667"), "my_sprl": ("0.9167", "0.5556")}  # 11/12, 5/9
    text, page = ((folder / name).read_text(encoding="utf-8") for name in ("scores.md", "report.html"))
    assert "P(better than PPO), final return | P(better than SPRL), final return | IQM of area |" in text
    assert re.search(r"\| my_sprl \| 3 \|.*\| 0\.92 \[.*\] \| 0\.56 \[.*\| 0\.92 \[.*\] \| 0\.56 \[.*\] \|\n", text)
    assert "beats a run of PPO or of SPRL;" in text and page.count('<th scope="col">P(better than SPRL), area') == 3
    assert {"label": "my_sprl", "colour": curves.OTHERS[0], "dash": ""} in json.loads(Page(page).scripts[0])["methods"]
    report.main(report.Args(str(folder), baseline="my_sprl"))
    text = (folder / "scores.md").read_text(encoding="utf-8")
    assert "P(better than my_sprl), area" in text and "better than PPO" not in text


def test_one_seed_other_methods_and_lengths(folder, capsys):
    """The ablation has one seed and no Maze-11, and its steps after 100 do not count."""
    write_csv(folder, "Maze-7-v0__k5__s1", [(50, 0.9), (100, 0.9), (200, 5.0)])
    report.main(report.Args(str(folder)))
    assert capsys.readouterr().err == "Maze-7-v0: runs of 100 to 200 steps, cut to 100\n"
    text = (folder / "scores.md").read_text(encoding="utf-8")
    assert (
        "| k5 | 1 | 0.900 | 0.900 | 100 | 0.900 [–] | – | – | 0.900 [–] | – | – |" in text
    )  # one run is no probability
    assert "threshold 0.720." in text  # 80 % of 0.9
    pooled = text.split("### All tasks")[1].split("###")[0]
    assert "| SPRL |" in pooled and "| PPO |" in pooled and "k5" not in pooled
    page = (folder / "report.html").read_text(encoding="utf-8")
    cells = [
        *re.findall(r"<td>(.*?)</td>", page),
        *re.findall(r"\[[^\]]*\]", text),
        (folder / "scores.csv").read_text(),
    ]
    assert len(cells) > 20 and not re.search(r"\b(nan|inf|none)\b", " ".join(cells), re.IGNORECASE)


def test_without_the_baseline(folder, capsys):
    with pytest.raises(SystemExit) as stop:
        report.main(report.Args(str(folder), baseline="a2c"))
    error = f"error: --baseline a2c has no run in {folder}, accepted: sprl, ppo\n"
    assert stop.value.code == 2 and capsys.readouterr().err.endswith(error) and not (folder / "scores.md").exists()
    for path in folder.glob("*__ppo__*"):
        path.unlink()
    report.main(report.Args(str(folder)))
    assert not capsys.readouterr().err, "a single method is compared with nothing"
    for path in folder.glob("*__sprl__*"):
        path.rename(path.with_name(path.name.replace("sprl", f"k{path.stem[-1]}")))
    report.main(report.Args(str(folder)))
    assert capsys.readouterr().err == "no run of ppo or sprl to compare with, see --baseline\n"
    for name in ("scores.md", "report.html"):
        assert "P(better" not in (folder / name).read_text(encoding="utf-8")


def test_tasks_of_other_scales_are_scaled(tmp_path):
    """Maze runs from 0 to 1 and Pong from -20 to 20: only scaled to [0, 1] can their runs be pooled."""
    for env_id, low, high in (("Maze", 0.0, 1.0), ("Pong", -20.0, 20.0)):
        for seed, (ppo, sprl) in enumerate(((0, 0.5), (0.25, 1), (0.25, 0.5)), 1):
            for method, value in (("ppo", ppo), ("sprl", sprl)):
                write_csv(tmp_path, f"{env_id}__{method}__s{seed}", [(50, low + value * (high - low))])
    rows, scaled = scores.make_scores(curves.read_folder(tmp_path))
    pooled = {row["method"]: row["final_iqm"] for row in rows if row["env"] == scores.ALL}
    assert scaled and pooled == {"sprl": 0.625, "ppo": 0.1875}  # of 0.5, 0.5, 0.5, 1 and of 0, 0.25, 0.25, 0.25
    assert "scaled in each task" in report.make_notes(rows, scaled, ["ppo"])[-1]


def test_single_points_are_not_drawn(folder):
    """A point without an interval says no more than the table; nor does a picture of earlier runs stay."""
    report.main(report.Args(str(folder)))
    assert (folder / "scores.png").exists()
    for path in folder.glob("*__s[34].csv"):
        path.unlink()
    report.main(report.Args(str(folder)))
    assert not (folder / "scores.png").exists() and (folder / "report.html").exists()


def test_success_is_called_success(folder):
    """In this folder the return is the success rate in all rows, as on Fetch; one row less, and it is a return."""
    report.main(report.Args(str(folder)))
    text, page = ((folder / name).read_text(encoding="utf-8") for name in ("scores.md", "report.html"))
    assert "| IQM of final success | P(better than PPO), final success |" in text and "the mean success over" in text
    assert [metric["label"] for metric in json.loads(Page(page).scripts[0])["metrics"]] == ["success rate"]
    assert "return" not in text + page.split("<script")[0]
    write_csv(folder, "Maze-7-v0__ppo__s4", [(50, 0.4), (100, 0.9)], success=0.4)
    report.main(report.Args(str(folder)))
    text, page = ((folder / name).read_text(encoding="utf-8") for name in ("scores.md", "report.html"))
    labels = [metric["label"] for metric in json.loads(Page(page).scripts[0])["metrics"]]
    assert labels == ["episode return", "success rate"] and "success" not in text


# PAGE ################################################################################################################
class Page(HTMLParser):
    """Checks that elements nest, and collects attributes, scripts, and the text of every code element."""

    VOID = {"meta", "link", "input", "path", "line", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.scripts, self.codes, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag not in self.VOID:
            self.open.append(tag)
            if tag in ("script", "code"):
                (self.scripts if tag == "script" else self.codes).append("")

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "code"):
            (self.scripts if self.open[-1] == "script" else self.codes)[-1] += data


HOSTILE = "</script><img src=x onerror=alert(1)>&amp;@@DATA@@\"'`|<!--"


def make_page(folder):
    runs = curves.read_folder(folder)
    return report.make_page(runs, *scores.make_scores(runs), ["ppo"], "Mazes")


def test_page_embeds_the_curves(folder):
    write_csv(folder, "Maze-7-v0__eco__s10", [(10, -3.5), (90, 12.25), (100, 0.0)], rnet_accuracy=0.8125, length=55.5)
    write_csv(folder, "Maze-7-v0__eco__s9", [(0, 1.0), (95, 2.0)])
    page = Page(make_page(folder))
    data = json.loads(page.scripts[0])
    assert [task["label"] for task in data["tasks"]] == ["Maze-7", "Maze-11"]
    assert [(m["label"], m["colour"]) for m in data["methods"]] == [
        ("SPRL", "#D55E00"), ("PPO", "#0072B2"), ("ECO", "#CC79A7"),
    ]  # fmt: skip
    assert [metric["id"] for metric in data["metrics"]] == ["return", "success", "length", "rnet_accuracy"]
    runs = curves.read_folder(folder)
    for env_id, task in zip(runs, data["tasks"]):
        for metric in ("return", "success", "length", "rnet_accuracy"):
            for method, found in zip(("sprl", "ppo", "eco"), task[metric]):
                grid, expected = curves.seed_curves(runs[env_id].get(method, []), metric, 1, data["points"])
                if found is None:
                    assert not expected
                    continue
                assert found["x"] == [grid[0], grid[-1]]
                actual = np.array(found["v"]) / 10 ** found["d"]
                np.testing.assert_allclose(actual, expected, rtol=0, atol=0.5001 / 10 ** found["d"])
    eco = data["tasks"][0]["return"][2]
    assert eco["s"] == [9, 10] and eco["x"] == [10, 95] and eco["d"] == 1  # both runs cover 10 to 95
    assert data["tasks"][0]["rnet_accuracy"][2]["v"] == [[812] * 100]  # of seed 10 only; 812.5 rounds to even


def test_page_needs_no_network_and_runs_nothing_from_files(folder, capsys):
    comments = {"command": f"python x.py --run-name {HOSTILE}", "commit": HOSTILE, "elapsed_s": HOSTILE}
    write_csv(folder, f"Maze-7-v0__{HOSTILE.replace('/', '')}__s1", [(50, 0.5), (100, 0.5)], comments)
    write_csv(folder, f"{HOSTILE.replace('/', '')}__ppo__s1", [(50, 0.5), (100, 0.5)], comments)
    report.main(report.Args(str(folder)))
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "//" not in re.sub(r"(?m)(^|\s)// .*", "", text), "an address, but no comment"
    assert not {"img", "iframe", "object", "embed"} & set(page.tags) and len(page.scripts) == 2
    assert not [a for a in page.attributes if a[1].startswith("on") or a[1] == "src"]
    assert [a for a in page.attributes if a[1] == "href"] == [("link", "href", "data:,")]
    assert page.codes.count(comments["command"]) == 2
    assert not set("<>&") & set(page.scripts[0])  # nor could <!-- and <script> change how the rest is read
    data = json.loads(page.scripts[0])
    assert HOSTILE.replace("/", "") in [m["label"] for m in data["methods"]] + [t["label"] for t in data["tasks"]]
    assert (
        page.scripts[1] == Page(report.TEMPLATE.read_text(encoding="utf-8")).scripts[1]
    )  # nothing was written into the program
    table = (folder / "scores.md").read_text(encoding="utf-8")
    assert "<" not in table and html.escape(HOSTILE.replace("/", ""), quote=False).split("`")[0] in table
    columns = {line.replace("\\|", "").count("|") for line in table.split("### Maze-7")[1].split("###")[0].splitlines()}
    assert columns == {0, 12}


def test_every_run_has_its_command(folder):
    page = Page(make_page(folder))
    assert page.codes == ["python x.py"] * 13
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("button", "aria-label")]
    assert labels[:2] == ["Copy the command of SPRL, Maze-7, seed 1", "Copy the command of SPRL, Maze-7, seed 2"]


def test_page_of_200_runs_is_small(tmp_path):
    rng = np.random.default_rng(0)
    rows = [(1000 * t, rng.random()) for t in range(1, 151)]
    write_csv(tmp_path, "Maze__sprl__s1", rows, success=0.5, length=99.9, cost_rate=0.125, rnet_accuracy=0.75)
    runs = curves.read_folder(tmp_path)
    table = scores.make_scores(runs)
    runs["Maze"]["sprl"] *= 200
    text = report.make_page(runs, *table, [], "Many")
    assert len(text) < 600_000


def test_bad_folders_are_refused(tmp_path, capsys):
    def refused(args):
        with pytest.raises(SystemExit) as stop:
            report.main(args)
        output = capsys.readouterr()
        assert stop.value.code == 2 and not output.out and output.err.count("\n") == 1, output
        return output.err

    assert "nowhere" in refused(report.Args(str(tmp_path / "nowhere")))
    assert "--threshold nan" in refused(report.Args(str(tmp_path), threshold=float("nan")))
    (tmp_path / "Maze__ppo__summary.csv").write_text("of another kind\n")
    (tmp_path / "other.csv").write_text("of another kind\n")
    assert str(tmp_path) in refused(report.Args(str(tmp_path)))  # neither is a run
    header = ",".join(curves.COLUMNS) + "\n"
    for text in ("", "hello\n", header + "1,inf,,,,\n", header + "nan,1,,,,\n", header + "2,1,,,,\n1,1,,,,\n", "\x00"):
        (tmp_path / "Maze__ppo__s1.csv").write_text(text)
        assert "Maze__ppo__s1.csv" in refused(report.Args(str(tmp_path)))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv"] * 3
    (tmp_path / "Maze__ppo__s1.csv").write_text(header + "1,1,,,,\n")
    (tmp_path / "scores.csv").mkdir()
    assert "scores.csv" in refused(report.Args(str(tmp_path)))


def test_page_in_a_browser(folder, tmp_path_factory):
    """Clicks through the page; what the cursor reads is the mean and standard error that curves.py finds."""
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium on the PATH: the page's program was not run")
    rng = np.random.default_rng(0)
    for seed in (1, 2, 3):
        rows = [(50, rng.random()), *((1000 * t, rng.random()) for t in range(1, 30))]
        write_csv(folder, f"Maze-7-v0__eco__s{seed}", rows, rnet_accuracy=0.8)
    probe = """<script>
    const seen = {}, buttons = id => document.querySelectorAll(`#${id} button`), lines = () => [
      document.querySelectorAll(".panel").length, document.querySelectorAll(".mean").length,
      document.querySelectorAll(".seed").length,
      [...document.querySelectorAll("tbody tr")].filter(row => row.offsetHeight).length];
    const read = () => document.querySelector(".plot").getAttribute("aria-valuetext");
    const press = key => document.querySelector(".plot").dispatchEvent(new KeyboardEvent("keydown", { key }));
    const keys = ["End", "PageDown", "PageDown", "ArrowLeft"];
    seen.start = lines();
    const hints = width => { // how many show, and how wide the page then is
      document.body.style.width = width + "px"; render();
      const shown = [...document.querySelectorAll(".hint")].filter(hint => !hint.hidden).length;
      return [shown, document.body.scrollWidth];
    };
    seen.hints = [hints(1600), hints(390)];
    $("matrix").click(); seen.hints.push(hints(1600), hints(390)); $("matrix").click();
    document.body.style.width = ""; render();
    for (const key of keys) press(key); seen.smooth = read();
    seen.tip = document.querySelector(".tip").innerText;
    $("window").value = 1; $("window").dispatchEvent(new Event("input"));
    for (const key of keys) press(key); seen.raw = read();
    $("seeds").click(); seen.seeds = lines();
    buttons("methods")[1].click(); seen.method = lines();
    buttons("tasks")[1].click(); seen.task = lines();
    $("matrix").click(); seen.matrix = lines();
    buttons("metrics")[2].click(); seen.accuracy = lines();
    $("matrix").click(); for (const i of [0, 2]) buttons("methods")[i].click();
    seen.nothing = document.getElementById("panels").innerText;
    seen.pressed = buttons("methods")[1].getAttribute("aria-pressed");
    const box = document.createElement("pre");
    box.id = "seen"; box.textContent = JSON.stringify(seen); document.body.append(box);
    </script></body>"""
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(make_page(folder).replace("</body>", probe), encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}"]
    ran = subprocess.run(
        [chromium, *flags, "--dump-dom", path.as_uri()], capture_output=True, encoding="utf-8", timeout=60,
        env={**os.environ, "HOME": str(path.parent)},
    )  # fmt: skip
    found = re.search(r'<pre id="seen">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found, ran.stdout[-2000:] + ran.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    # panels, curves, seeds' curves, rows of tables
    assert seen["start"] == [2, 5, 0, 7] and seen["seeds"] == [2, 5, 16, 7]
    assert seen["method"] == [2, 3, 9, 4]  # without PPO
    assert seen["task"] == [1, 2, 6, 3]  # without Maze-11, but for the pool of all tasks
    assert seen["matrix"] == [2, 2, 6, 3] and seen["accuracy"] == [2, 1, 3, 3]
    assert seen["hints"] == [
        [0, 1600],
        [3, 390],
        [0, 1600],
        [4, 390],
    ]  # three tables and the grid scroll
    assert seen["pressed"] == "false" and seen["nothing"] == "Every method is switched off."
    runs, found = curves.read_folder(folder)["Maze-7-v0"]["eco"], []
    for name, window in (("smooth", 3), ("raw", 1)):
        grid, lines = curves.seed_curves(runs, "return", window, report.POINTS)
        mean, error = curves.mean_and_error(lines)
        step, value, spread = re.fullmatch(r"step (\S+): ECO (\S+) ± (\S+)", seen[name]).groups()
        step = int(step.replace(",", ""))
        assert step == round(50 + (29_000 - 50) * 78 / 99)  # 21 of 100 positions before the end
        expected = [np.interp(step, grid, line) for line in (mean, error)]
        np.testing.assert_allclose([float(value), float(spread)], expected, atol=0.0012)  # values have 3 digits
        found.append(expected)
    assert abs(np.subtract(*found)).max() > 0.01, "too dull for a test"
    assert "ECO" in seen["tip"] and "3 seeds" in seen["tip"]
