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
DISPATCH = {"make_envs", "make_agent", "make_rnet", "find_domain", "env_id"}
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


def test_labels_are_true():
    """What the audit found of the authors' code, where a script names it."""
    labels = {"rnet_start": "30K", "rnet_triplets": "15K", "label_smoothing": "0.1", "rnet_batch_size": "64"}
    for source in SOURCES.values():
        fields = args_fields(source)
        for name, value in labels.items():
            assert name not in fields or f"(authors' code: {value})" in fields[name][1], name
        for name, (_, text) in fields.items():
            assert name != "rnet_reliable_accuracy" or "authors" not in text
    texts = {name: args_fields(source) for name, source in SOURCES.items()}
    assert "authors' code: 32" in texts["ppo_sprl_dmlab.py"]["rnet_width"][1]
    assert "authors' code: 2e-4" in texts["ppo_sprl_dmlab.py"]["rnet_weight_decay"][1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_runs_help(name, run, capsys):
    with pytest.raises(SystemExit) as exit_:
        run("--help", name)
    assert exit_.value.code == 0 and "--learning-rate" in capsys.readouterr().out
