"""Same name, same code: what two scripts share is identical in both, so that their diff shows the algorithm alone."""

import ast
import difflib
import re
from itertools import combinations

import pytest
from conftest import CANONICAL, ROOT, SCRIPTS

MARKERS = ("SETUP", "ROLLOUT", "INTRINSIC REWARD", "ADVANTAGE", "UPDATE POLICY", "LOG", "CHECKPOINT")
SHARED = ("ADVANTAGE", "UPDATE POLICY", "LOG")
# what a script says of its domains: one in ppo_sprl_*.py, three in ppo_gtgrid.py, all in the other baselines
DISPATCH = {"make_envs", "make_agent", "make_rnet", "env_id"}
SOURCES = {name: (ROOT / name).read_text() for name in SCRIPTS}


def definitions(source):
    """{name: source} of the top-level functions and classes, decorators included; Args has rules of its own."""
    found, lines = {}, source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "Args":
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def sections(source):
    """{marker: text below it} of a script's main block, in order."""
    _, main = source.split('\nif __name__ == "__main__":\n')
    parts = re.split(r"^ +# ([A-Z ]+) #{9,}\n", main, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def args_fields(source):
    """{field: (type, help)} of Args; the help is the comment behind the field."""
    (args,) = [node for node in ast.parse(source).body if getattr(node, "name", None) == "Args"]
    lines, fields = source.splitlines(), {}
    for node in args.body:
        _, _, text = lines[node.end_lineno - 1].partition("  # ")
        fields[node.target.id] = ast.unparse(node.annotation), text
    return fields


def args_types(source):
    return {name: annotation for name, (annotation, _) in args_fields(source).items()}


def shared_sections(source):
    """The sections that all methods share; ICM's part of the joint loss is left out."""
    source = re.sub(r" +if icm:\n +mb_obs.*\n(?: {24}.+\n)+", "", source)
    source = source.replace("clip_grad_norm_(parameters,", "clip_grad_norm_(agent.parameters(),")
    return {marker: text for marker, text in sections(source).items() if marker in SHARED}


def disagreements(sources):
    """Unified diffs of everything of one name that differs between two scripts."""
    diffs = []
    for (name_a, a), (name_b, b) in combinations(sources.items(), 2):
        for parts in (definitions, args_types, shared_sections):
            of_a, of_b = parts(a), parts(b)
            shared = of_a.keys() & of_b.keys()
            if {name_a, name_b} != {"ppo_eco.py", "ppo_icm.py"}:
                shared -= DISPATCH
            for part in shared:
                lines = of_a[part].splitlines(), of_b[part].splitlines()
                diffs.append(
                    "\n".join(difflib.unified_diff(*lines, f"{name_a}: {part}", f"{name_b}: {part}", lineterm=""))
                )
        order_a, order_b = list(sections(a)), list(sections(b))
        if [m for m in order_a if m in order_b] != [m for m in order_b if m in order_a]:
            diffs.append(f"{name_a} and {name_b}: sections in another order, {order_a} and {order_b}")
    return [diff for diff in diffs if diff]


def test_same_name_same_code():
    domains = [f"ppo_sprl_{domain}.py" for domain in ("atari", "dmlab", "fetch", "minigrid")]
    assert list(SOURCES) == ["ppo_eco.py", "ppo_gtgrid.py", "ppo_icm.py", *domains]
    diffs = disagreements(SOURCES)
    assert not diffs, "\n\n".join(diffs)


@pytest.mark.parametrize(
    "old, new",
    [
        ("lastgaelam = torch.zeros_like", "lastgaelam = torch.ones_like"),
        ("    seed: int", "    seed: float"),
        ("optimizer.step()\n", "optimizer.step() # now\n"),
    ],
)
def test_a_drifted_sibling_is_found(old, new):
    """The check above finds one changed function, type or section in an otherwise equal copy."""
    source = SOURCES[CANONICAL]
    assert disagreements({"a.py": source, "b.py": source}) == []
    (diff,) = disagreements({"a.py": source, "b.py": source.replace(old, new, 1)})
    assert "\n-" in diff and "\n+" in diff


def test_another_order_of_sections_is_found():
    source = SOURCES[CANONICAL]
    swapped = re.sub("# (UPDATE RNET|LOG) ##", lambda m: f"# {'LOG' if m[1] != 'LOG' else 'UPDATE RNET'} ##", source)
    assert any("another order" in diff for diff in disagreements({"a.py": source, "b.py": swapped}))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_documented(name):
    """A docstring with two commands, all shared sections, and a help behind every field of Args."""
    docstring = ast.get_docstring(ast.parse(SOURCES[name]))
    assert docstring and docstring.count(f"python {name}") >= 2
    assert [marker for marker in sections(SOURCES[name]) if marker != "UPDATE RNET"] == list(MARKERS)
    assert [field for field, (_, text) in args_fields(SOURCES[name]).items() if not text] == []


# what the labels say: the paper's tables and what the audit found of the authors' code, written down again
PPO = {"num_envs": "authors' code: 12", "num_steps": "authors' code: 256"}
PPO |= {"clip_coef": "authors' code: 0.1", "anneal_clip": "authors' code"}
GRID = "paper's MiniGrid"  # a baseline's flags are shown on the other domains, too
ON_GRID = PPO | {"learning_rate": f"{GRID}: 0.003, for SPRL 0.01", "ent_coef": f"{GRID}: 0.01"}
ON_GRID |= {"max_episode_steps": f"{GRID}: 100", "stack_observations": f"{GRID}: 0"}
RNET = {
    "rnet_start": "authors' code: 30K",
    "rnet_triplets": "authors' code: 15K",
    "label_smoothing": "authors' code: 0.1",
}
RNET |= {"rnet_batch_size": "authors' code: 64", "rnet_learning_rate": "authors' code: 3e-4"}
COST = RNET | {"tolerance": "paper: 1", "cost_percentile": "paper: 90", "positive_bias": "paper: 5"}
SMALL = {"ring_size": "paper: 30K", "heldout_pairs": "paper: 7,500"}
LARGE = {"ring_size": "paper: 60K", "heldout_pairs": "paper: 15K"}
GRID_LARGE = {"ring_size": f"{GRID}: 60K", "heldout_pairs": f"{GRID}: 15K"}
LABELS = {
    "ppo_sprl_minigrid.py": ON_GRID | COST | GRID_LARGE | {
        "cost_scale": "paper: 0.002", "cost_bias": "paper: 0", "k": "paper: 2", "num_tolerance_samples": "paper: 60",
        "negative_bias": "paper: 20",
    },
    "ppo_sprl_atari.py": PPO | COST | SMALL | {
        "learning_rate": "paper: 5e-4", "ent_coef": "paper: 0.01", "cost_scale": "paper: 0.05",
        "max_episode_steps": "paper: 10,000", "stack_observations": "paper: 3", "cost_bias": "paper: 0",
        "k": "paper: 12", "num_tolerance_samples": "paper: 200", "negative_bias": "paper: 80",
        "rnet_weight_decay": "paper: 0.03",
    },
    "ppo_sprl_fetch.py": PPO | COST | SMALL | {
        "learning_rate": "paper: 5e-4", "ent_coef": "paper: 0.001, for PPO 0.01", "max_episode_steps": "paper: 50",
        "n_substeps": "paper's study: 2, 3, 4, 6", "action_noise": "paper: 0.003, for SPRL not given",
        "cost_scale": "paper: 0.05", "cost_bias": "paper: 1", "k": "paper: 10", "num_tolerance_samples": "paper: 20",
        "negative_bias": "paper: 12",
    },
    "ppo_sprl_dmlab.py": PPO | COST | LARGE | {
        "learning_rate": "paper: 3e-4", "ent_coef": "paper: 0.004", "max_grad_norm": "authors' code: 10",
        "stack_observations": "paper: 0", "cost_scale": "paper: 0.06", "cost_bias": "authors' code: 0.5",
        "k": "paper: 10", "num_tolerance_samples": "paper: 200", "negative_bias": "paper: 20",
        "rnet_width": "authors' code: 32", "rnet_weight_decay": "authors' code: 4e-4",
    },
    "ppo_eco.py": ON_GRID | RNET | GRID_LARGE | {
        "action_noise": "paper: 0.003", "bonus_scale": f"{GRID}: 0.001", "bonus_bias": "authors' DMLab code: 0.5",
        "k": f"{GRID}: 3", "whole_bias": "authors' code", "memory_size": "authors' code: 200",
        "memory_percentile": "authors' code: 90",
    },
    "ppo_icm.py": ON_GRID | {"action_noise": "paper: 0.003", "bonus_scale": f"{GRID}: 0.1, not divided"},
    "ppo_gtgrid.py": ON_GRID | {"bonus_scale": f"{GRID}: 0.01", "cell_size": f"{GRID}: 1"},
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_labels_are_true(name):
    """What stands in brackets behind a setting. For the gate, which is ours, nobody is named."""
    texts = {field: text for field, (_, text) in args_fields(SOURCES[name]).items()}
    for field, label in LABELS[name].items():
        assert re.findall(r"\(((?:paper|authors').*?)\)", texts[field]) == [label], field
    assert not re.search("paper|authors", texts.get("rnet_reliable_accuracy", ""))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_runs_help(name, run, capsys):
    with pytest.raises(SystemExit) as exit_:
        run("--help", name)
    assert exit_.value.code == 0 and "--learning-rate" in capsys.readouterr().out
