"""Makes a small copy of an agent.pt that still plays: the policy alone, in half precision.

    python analysis/export_agent.py runs/<name>/agent.pt --out results/agents
    python analysis/evaluate.py results/agents/<env>__<method>__s<seed>.pt --video agent.gif

The copy keeps the script, the command, the commit and the settings. It has neither optimizer nor RNet, so no training
can go on from it. Half precision is too large for 1 MB where a layer has a million weights, as on the 11x11 maps.
Such a matrix is stored in 8 bits, as whole numbers from -127 to 127 with a scale per row. load_run reads both.
"""

import io
import os
import re
import zipfile
from dataclasses import dataclass

import torch
import tyro
from common import fail, first_line, load_checkpoint, parse_args, written_whole
from curves import method_label, task_name

MOST_IN_HALF = 2**19  # weights of a matrix, 1 MB; more are stored in 8 bits


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]  # path of the agent.pt that a training wrote
    out: str = "runs/results/agents"  # folder of the copy, made if missing


def shrink(agent):
    """The policy's tensors as float16, the large matrices as int8; and the scales (rows, 1) of the latter."""
    large = {name: part for name, part in agent.items() if part.ndim == 2 and part.numel() > MOST_IN_HALF}
    scales = {name: part.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127 for name, part in large.items()}
    small = {name: part.half() if part.is_floating_point() else part for name, part in agent.items()}
    return small | {name: (large[name] / scales[name]).round().to(torch.int8) for name in large}, scales


def main(args):
    needs = {"script": str, "args": dict, "agent": dict, "optimizer": dict}  # the last one: not a copy already
    checkpoint = load_checkpoint(args.checkpoint, needs)
    try:
        label = method_label(checkpoint["script"], checkpoint["args"])
        name = f"{task_name(checkpoint['args'])}__{label}__s{checkpoint['args']['seed']}.pt"
        kept = {key: checkpoint[key] for key in ("script", "command", "commit", "args", "global_step")}
        kept["args"] = kept["args"] | {"resume": None}  # a path of the machine that trained it
        agent, scales = shrink(checkpoint["agent"])
    except (AttributeError, LookupError, TypeError) as error:
        fail(f"{args.checkpoint} is not a checkpoint of a training ({first_line(error)})")
    plain, name = io.BytesIO(), re.sub(r"[^\w.-]", "-", name)  # ids like ALE/Pong-v5 have a slash
    torch.save(kept | {"history": [], "agent": agent, "scales": scales}, plain)
    with written_whole(args.out, name) as (path,), zipfile.ZipFile(path, "w") as packed:
        parts = zipfile.ZipFile(plain)
        for part in parts.infolist():  # torch.save compresses nothing, torch.load reads what is compressed
            packed.writestr(part, parts.read(part), zipfile.ZIP_DEFLATED, compresslevel=9)
    path = os.path.join(args.out, name)
    print(f"{path}: {os.path.getsize(path) / 1e3:.0f} kB")


if __name__ == "__main__":
    main(parse_args(Args))
