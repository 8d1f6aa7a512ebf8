"""What must hold of the runs of a case."""

import collections
import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import elastic_storm
import events
import jax
import numpy as np
from conftest import run
from joint_cases import POLICIES, SHAPES, Shape, keys_of, writable
from joint_runs import Failed, Refused, Runs, answer, records_of, steps_of

from maxramp import suggest
from maxramp.checkpoints import arrays
from maxramp.checkpoints import folder as folder_lib
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.data.opening import open_rows
from maxramp.data.rows import PADDING
from maxramp.errors import ConfigError
from maxramp.measuring.wall_time import wall_time
from maxramp.parallel import mesh
from maxramp.rampup.phases import MIXTURE
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import abstract_state

# What the clock measured or a restart marks, and what follows from how a batch lies on devices.
_TIMES = re.compile("second|tflops|restarted|^time$|goodput")
# A token whose experts score alike may go to another one.
_LOAD_NEAR = 3e-2
_OF_SHAPE = re.compile("per_device|devices|nodes|accumulation|noise|eval_batch")


# --- What holds ----------------------------------------------------------------------------------


def as_planned(runs: Runs, name: str, shape: Shape) -> None:
    """Checks that a run takes the steps of its thresholds and of its plan."""
    case, records = runs.case, steps_of(runs.folder / name)
    if [r["step"] for r in records] != list(range(len(records))):
        raise Failed("steps are missing or twice", str([r["step"] for r in records]))
    batches = [r["global_batch_size"] for r in records]
    planned = json.loads((runs.folder / name / "plan.json").read_text())["stages"]
    if case.ramp not in POLICIES:
        expected = case.batches
        if case.has("data") == "passes":
            expected = dataclasses.replace(case, steps=len(batches)).batches
        if batches != expected:
            raise Failed("batches are not those of the thresholds", f"{batches}\n{expected}")
    for stage in planned:
        own = [r for r in records if r["stage"] == stage["index"]]
        planned_keys = {"global_batch_size": stage["global_batch_size"]}
        planned_keys |= {"gradient_accumulation_steps": stage["gradient_accumulation_steps"]}
        for record in own:
            if any(record.get(key) != value for key, value in planned_keys.items()):
                raise Failed("a step is not that of plan.json", f"{stage}\n{record}")
        if own and own[0]["step"] != stage["first_step"]:
            raise Failed("a stage begins elsewhere than in plan.json", f"{stage}\n{own[0]}")
    if case.ramp == "noise":
        return
    nodes = [f"num_nodes={shape.processes}", f"devices_per_node={shape.devices}"]
    nodes += ["node_schedule=fixed"]
    if case.has("data") == "passes":
        nodes += [f"total_samples={sum(batches)}"]
    before = runs.planned(*runs.arguments(name, shape), *nodes)
    trained = [r["stage"] for r in records]
    kept = ("index", "first_step", "first_sample", "global_batch_size")
    for stage, shown in zip(before["stages"], planned, strict=False):
        if {k: stage[k] for k in kept} != {k: shown[k] for k in kept} and stage["index"] in trained:
            raise Failed("plan --json is not plan.json", f"{stage}\n{shown}")
    if before.get("total_steps", len(records)) != len(records):
        raise Failed("the plan has other steps", f"{before['total_steps']}\n{len(records)}")


def frozen_stay(runs: Runs, name: str) -> None:
    """Checks that frozen weights keep every bit from the first checkpoint to the last."""
    path = runs.folder / name / "checkpoints"
    config = load([str(runs.folder / name / "config.yml")], runs.program)
    with jax.set_mesh(mesh.line()):
        state = abstract_state(config.recipe, mesh.line())
        items = {"model": arrays.items_of(state)["model"]}
        steps = folder_lib.steps_in(path)
        first, last = (
            arrays.named_leaves(arrays.load(path / str(step), items))
            for step in (steps[0], steps[-1])
        )
    trained = arrays.named_leaves({"model": state.trained})
    layers = config.optimizer.trainable_layers
    for weight, x in last.items():
        moves = np.asarray(x) != np.asarray(first[weight])
        kind = weight.split(".")[2] if weight.startswith("model.layers.") else ""
        own = [number for number, layer in enumerate(state.model.pattern) if layer.kind == kind]
        if layers:
            moves = np.delete(moves, [i for i, number in enumerate(own) if number in layers], 0)
        # Biases of routers, which no optimizer moves, train with them.
        trains = weight.replace("router.bias_E", "router.matrix_DE") in trained
        if moves.any() and (layers or not trains):
            raise Failed("a frozen weight moves", weight)


def same(
    runs: Runs, one: str, other: str, exact: bool, near: float = 2e-3, own: str = "$^"
) -> None:
    """Checks that two runs are the same, to the last bit or up to the order of sums, but for the
    metrics that a run has for its `own`: a pattern.

    Steps magnify the order of sums (Muon at a high rate makes 3e-7 in 50 steps 3e-3), but little by
    little: other rows or a lost update show as a jump.
    """
    folders = [runs.folder / name for name in (one, other)]
    left, right = map(records_of, folders)
    steps = [[(r["step"], "loss" in r) for r in records] for records in (left, right)]
    if steps[0] != steps[1]:
        raise Failed("other steps or evaluations", f"{steps[0]}\n{steps[1]}")
    largest: collections.defaultdict[str, float] = collections.defaultdict(float)
    for a, b in zip(left, right, strict=True):
        names = [n for n in a.keys() | b.keys() if not _TIMES.search(n) and not re.search(own, n)]
        for name in sorted(names):
            if not exact and _OF_SHAPE.search(name):
                continue
            is_routed = "expert_load" in a and name in ("expert_load", "grad_norm")
            tolerance = max(near, _LOAD_NEAR) if is_routed else near
            tolerance = 0 if exact else max(tolerance, 10 * largest[name])
            distance = _distance(a.get(name), b.get(name))
            largest[name] = max(largest[name], distance)
            if distance > tolerance:
                text = f"step {a['step']}: {name} {a.get(name)} in {one}, {b.get(name)} in {other}"
                raise Failed(f"{name} differs", text)
    tags = [
        {
            tag: sorted(curve)
            for tag, curve in events.shown(folder / "tensorboard").items()
            if not _TIMES.search(tag)
            and not re.search(own, tag)
            and (exact or not _OF_SHAPE.search(tag))
        }
        for folder in folders
    ]
    if tags[0] != tags[1]:
        raise Failed("TensorBoard shows other steps", f"{tags[0]}\n{tags[1]}")


def _distance(a: Any, b: Any) -> float:
    """Returns the largest difference of two values of a metric, relative to those above 1; infinite
    where they are not numbers that can be near."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((_distance(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, float) and isinstance(b, float) and math.isfinite(a - b):
        return abs(a - b) / max(1.0, abs(a), abs(b))
    return 0.0 if a == b else math.inf


def same_checkpoints(runs: Runs, one: str, other: str, last_alone: bool) -> None:
    """Checks that both have kept the same checkpoints, and the same best one."""
    kept = [folder_lib.steps_in(runs.folder / name / "checkpoints") for name in (one, other)]
    if last_alone or {one, other} & runs.left_out_saves:
        kept = [steps[-1:] for steps in kept]
    if kept[0] != kept[1]:
        raise Failed("other checkpoints are kept", f"{one} {kept[0]}, {other} {kept[1]}")
    best = [runs.folder / name / "checkpoints" / "best" for name in (one, other)]
    texts = [
        path.read_text()
        if path.is_file()
        else os.path.basename(os.path.realpath(path))
        if path.exists()
        else ""
        for path in best
    ]
    if texts[0] != texts[1]:
        raise Failed("another best checkpoint", f"{texts}")


def same_exports(runs: Runs, one: str, other: str, exact: bool) -> None:
    """Checks that both were exported in the same files, with the same tensors."""
    folders = [runs.folder / name / "exported" for name in (one, other)]
    names = [sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()) for f in folders]
    if names[0] != names[1]:
        raise Failed("other files are exported", f"{names[0]}\n{names[1]}")
    for name in names[0]:
        if name.endswith(".safetensors"):
            left, right = (_tensors(folder / name) for folder in folders)
            if left.keys() != right.keys():
                raise Failed("other tensors are exported", f"{left.keys() ^ right.keys()}")
            for tensor, x in left.items():
                apart = float(
                    np.abs(x.astype(np.float32) - right[tensor].astype(np.float32)).mean()
                )
                if apart > (0 if exact else 2e-3):
                    raise Failed("an exported tensor differs", f"{tensor}: {apart} on average")
        else:
            left, right = (
                (f / name).read_text().replace(str(r), "")
                for f, r in zip(folders, (one, other), strict=True)
            )
            if exact and re.sub('"weights": .*|"path": .*', "", left) != re.sub(
                '"weights": .*|"path": .*', "", right
            ):
                raise Failed(
                    f"exported {os.path.basename(name)} differs", f"{left[:500]}\n{right[:500]}"
                )


def _tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    import torch
    from safetensors.torch import load_file

    return {name: x.to(torch.float32).numpy() for name, x in load_file(path).items()}


# --- The checks ----------------------------------------------------------------------------------


def check_killed(runs: Runs) -> None:
    """Checks that a run that is killed and continued on other devices is the uninterrupted one."""
    first, *later = runs.case.shapes
    name = "struck"
    starts = zip(runs.case.shapes, runs.case.moments, strict=False)
    for number, (shape, moment) in enumerate(starts):
        runs.train(name, shape, moment, **(runs.other_keys() if number % 2 else {}))
        _harm_records(runs.folder / name, runs.case.has("records"))
    if any(runs.train(name, later[-1])):
        raise Failed("an exit status", "of the last start")
    _check_report(runs.folder / name)
    exact = {*later} == {first}
    same(runs, "whole", name, exact)
    same_checkpoints(runs, "whole", name, any("TERM" in m for m in runs.case.moments))
    same_exports(runs, "whole", name, exact)


def _harm_records(folder: pathlib.Path, how: str) -> None:
    """Does to the records of a run what a power loss or a clock an hour ahead does."""
    for path in folder.glob("*.jsonl"):
        data = path.read_bytes()
        if how == "torn":
            path.write_bytes(data + b'{"step": 3, "ti')
        elif how == "ahead":
            time = re.compile(rb'(?<="time": )[\d.]+')
            path.write_bytes(time.sub(lambda match: b"%.6f" % (float(match[0]) + 3600), data))


def _check_report(folder: pathlib.Path) -> None:
    """Checks that a report's shares add up, and that its steps are those of the records."""
    report = wall_time(folder, None)
    if abs(sum(report["seconds"].values()) - report["wall_seconds"]) > 1e-3:
        raise Failed("the report does not add up", json.dumps(report))
    if report["warnings"] or report["steps"] != len(steps_of(folder)):
        raise Failed("the report counts other steps", json.dumps(report))


def check_moved(runs: Runs) -> None:
    """Checks that a run on other devices, in other passes, is the same."""
    runs.train("moved", runs.case.shapes[1])
    same(runs, "whole", "moved", exact=False)
    same_checkpoints(runs, "whole", "moved", last_alone=False)
    same_exports(runs, "whole", "moved", exact=False)


def check_elastic(runs: Runs) -> None:
    """Checks that an elastic launch that loses a node is the same run."""
    keys = {"elastic": True, "num_nodes": 2, "devices_per_node": 1, "hardware": "cpu"}
    keys |= {"node_schedule": "fixed", "node_rest_seconds": 3}
    _, *arguments = runs.arguments("elastic", runs.case.shapes[0], **keys)
    folder = runs.folder / "elastic"
    launch = elastic_storm.Launch(
        folder, arguments, "grpo.yml" if runs.program == "grpo" else "base.yml"
    )
    launch.wait_for(lambda: launch.step() >= runs.case.steps // 3, 300)
    killed = launch.kill(1)
    launch.wait_for(lambda: False, 600)
    if launch.running():
        launch.process.terminate()
    status, text = launch.process.wait(), launch.printed()
    if status or not killed or "lost node 1" not in text:
        raise Failed("an elastic launch", f"status {status}, killed: {killed}\n{text[-3000:]}")
    same(runs, "whole", "elastic", exact=False)
    same_exports(runs, "whole", "elastic", exact=False)


def check_notation(runs: Runs) -> None:
    """Checks that the same ramp in another notation is the same run."""
    case, shape = runs.case, runs.case.shapes[0]
    names, others = writable(case, shape), {}
    notation = names[(names.index(case.ramp) + 1) % len(names)]
    if case.ramp in POLICIES:  # its stages as a list
        stages = json.loads((runs.folder / "whole" / "plan.json").read_text())["stages"]
        listed = [[stage["first_sample"], stage["global_batch_size"]] for stage in stages]
        distinct = [p for i, p in enumerate(listed) if not i or p[1] != listed[i - 1][1]]
        runs = dataclasses.replace(
            runs, case=dataclasses.replace(case, ramp="megatron", thresholds=distinct)
        )
        notation = "megatron"
        others = {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
        if case.ramp == "noise":
            others |= {"log_gradient_noise_scale": True}
        others |= {"total_samples": sum(case.batches), "steps": -1, "total_tokens": -1}
        named = {k: v for k, v in keys_of(case, shape).items() if k.startswith("batch_size_lr")}
        others |= named
    runs.train("rewritten", shape, notation=notation, **others)
    exact = case.ramp != "maxtext" and notation != "maxtext"
    same(runs, "whole", "rewritten", exact, own="noise_lower_bound")  # of the policy's decisions
    same_exports(runs, "whole", "rewritten", exact=False)


def check_branch(runs: Runs) -> None:
    """Checks that a branch at the run's own batch reproduces the run: its rows, and its losses if
    the rate stays the same."""
    records, whole = steps_of(runs.folder / "whole"), runs.folder / "whole"
    steps = [s for s in folder_lib.steps_in(whole / "checkpoints") if 0 < s < len(records)]
    if not steps:
        raise Refused("no checkpoint to branch from")
    own = records[steps[0] :]
    rows, row = own[0]["global_batch_size"], own[0]["consumed_tokens"] // own[0]["consumed_samples"]
    line = [str(whole), "--at", str(steps[0]), "--sizes", f"{rows},{2 * rows}"]
    done = run(
        *line, "--tokens", str(2 * rows * row), module="branch", devices=runs.case.shapes[0].devices
    )
    if done.returncode:
        log = re.findall(r"^log +(.*)$", done.stdout, re.MULTILINE)
        raise Failed(
            "a branch fails",
            done.stderr + "".join(pathlib.Path(p).read_text()[-3000:] for p in log),
        )
    (folder,) = (whole / "branches").glob(f"*/{rows}")
    branch = steps_of(folder)
    rates, sames = (
        [a["learning_rate"] for a in own[:2]],
        [a["global_batch_size"] == rows for a in own[:2]],
    )
    for index, (a, b) in enumerate(zip(own, branch[:2], strict=False)):
        names = [
            "batch_fingerprint",
            "consumed_samples",
            "consumed_tokens",
            "target_tokens",
            "row_length",
        ]
        if not index or (len({*rates}) == 1 and rates[0] == branch[0]["learning_rate"]):
            names += ["loss", "grad_norm"]
        if not all(sames[: index + 1]) or a.get("stage") != own[0].get("stage"):
            break
        for name in names:
            if _distance(a[name], b[name]) > 1e-5:
                raise Failed(
                    f"a branch's {name} differs",
                    f"step {a['step']}: {a[name]} in the run, {b[name]} in {folder}",
                )


def check_suggest(runs: Runs) -> None:
    """Checks that the keys that suggest prints make the plan that it shows."""
    shape = runs.case.shapes[0]
    line = [
        *runs.arguments("suggested", shape),
        f"devices_per_node={shape.processes * shape.devices}",
        "num_nodes=1",
        "node_schedule=fixed",
    ]
    measured = str(runs.world.measured)
    for evidence in ("--branch", "--noise"):
        suggestion = json.loads(answer(suggest.main, [*line, "--json", evidence, measured]))
        if not (batches := suggestion["batches"]) or not suggestion["rows"][1]["steps"]:
            continue
        keys = [f"{k}={v}" for k, v in suggestion["keys"].items()]
        try:
            planned = runs.planned(*line, *keys)
        except Refused as error:
            raise Failed("suggest's keys are refused", f"{keys}\n{error}") from None
        if planned["total_steps"] != suggestion["rows"][1]["steps"]:
            shown = suggestion["rows"][1]["steps"]
            text = f"{keys}: {planned['total_steps']} steps planned, {shown} shown"
            raise Failed("suggest's keys make other steps", text)
        sizes = [s["global_batch_size"] for s in planned["stages"]]
        distinct = [x for i, x in enumerate(sizes) if not i or x != sizes[i - 1]]
        if distinct != [rows for _, rows in batches][: len(distinct)]:
            raise Failed("suggest's keys make other batches", f"{keys}: {distinct}, {batches}")


def check_schedule(runs: Runs) -> None:
    """Checks that steps take the same rows at the same rate on all devices, in all notations."""
    case, first = runs.case, None
    for shape in SHAPES:
        one = dataclasses.replace(case, shapes=(shape,))
        for notation in writable(case, shape) if one.is_valid else ():
            schedule = _schedule(runs.arguments("planned", shape, notation), shape)
            first = first or schedule
            if schedule != first:
                pairs = zip(schedule, first, strict=False)
                apart = next(pair for pair in pairs if pair[0] != pair[1])
                raise Failed("another schedule", f"{notation} on {shape}: {apart}")
    if first and case.ramp not in POLICIES and [rows for _, rows, *_ in first] != case.batches:
        raise Failed("batches are not those of the thresholds", f"{first}")


def _schedule(arguments: list[str], shape: Shape) -> list[tuple[int, int, int, float]]:
    """Returns first sample, rows, tokens of a row and learning rate of every step."""
    devices = shape.processes * shape.devices
    try:
        config = resolve(load(arguments), devices, 1, shape.processes)
        ramp = RampupBatchManager(config.batch, devices)
        rate, schedule = LearningRate.from_keys(config.learning_rate, ramp), []
    except ConfigError as error:
        raise Refused(f"error: {error}") from None
    is_known = config.batch.rampup_policy != "noise"
    for step in range(ramp.total_steps if is_known else 0):
        stage, sample = ramp.stage_at_step(step), ramp.samples_before(step)
        rows = stage.global_batch_size
        schedule.append((sample, rows, stage.spec.row_length, round(float(rate(sample, rows)), 9)))
    return schedule


def check_wrong(runs: Runs) -> None:
    """Checks that a wrong key is refused in one line before step 0."""
    name, _, value = runs.case.wrong.partition("=")
    try:
        runs.train("wrong", runs.case.shapes[0], **{name: value})
    except Refused:
        return
    raise Failed("a wrong key is taken", runs.case.wrong)


def opens(runs: Runs, name: str) -> None:
    """Checks that transformers opens the export, and computes the held-out loss of the run."""
    import torch
    import transformers

    (folder,) = (runs.folder / name / "exported").iterdir()
    transformers.logging.set_verbosity_error()
    path = folder
    if (folder / "adapter_config.json").exists():
        import peft

        model = peft.AutoPeftModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    last = [r for r in records_of(runs.folder / name) if "eval_loss" in r][-1:]
    case = runs.case
    if not last or case.has("data") in ("dpo", "grpo") or case.has("evaluation") == "some":
        return
    config = resolve(
        load([str(runs.folder / name / "config.yml")]),
        case.shapes[0].processes * case.shapes[0].devices,
        1,
        case.shapes[0].processes,
    )
    later = [(p.first_sample, p.changes[MIXTURE]) for p in config.batch.changing(MIXTURE)]
    corpus = open_rows(config.data, True, later=later)
    total = count = 0
    for part in corpus.held_out:
        for index in range(len(part.items)):
            row = part.items[index]
            S = len(row.tokens)
            begins = [*(row.begins if row.begins is not None else []), S]
            is_target = np.ones(S, bool) if row.is_target is None else row.is_target
            for a, b in zip([0, *begins], begins, strict=False):
                tokens = row.tokens[a:b]
                use = tokens[1:][(known := is_target[a + 1 : b] & (tokens[1:] != PADDING))]
                if not len(use):
                    continue
                ids = torch.tensor(
                    np.where(tokens == PADDING, 0, tokens)[None, :-1].astype(np.int64)
                )
                with torch.no_grad():
                    logits = model(ids).logits[0].float()
                losses = -torch.log_softmax(logits, -1)[torch.tensor(known)]
                total += float(losses.gather(1, torch.tensor(use.astype(np.int64))[:, None]).sum())
                count += len(use)
    wanted = last[0]["eval_loss"]
    if last[0]["eval_tokens"] != count:
        raise Failed(
            "other held-out tokens", f"{last[0]['eval_tokens']} in the run, {count} counted"
        )
    near = 3e-2 if case.has("step") == "bfloat16" else 1e-3
    if abs(total / count - wanted) > near:
        raise Failed(
            "the export's loss differs", f"{total / count} in transformers, {wanted} in the run"
        )


CHECKS: dict[str, Callable[[Runs], None]] = {
    "killed": check_killed,
    "moved": check_moved,
    "elastic": check_elastic,
    "notation": check_notation,
    "branch": check_branch,
    "suggest": check_suggest,
    "schedule": check_schedule,
    "wrong": check_wrong,
}
TRAINING = ("killed", "moved", "elastic", "notation", "branch")  # after the run itself
