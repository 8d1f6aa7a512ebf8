"""Writes the table of docs/performance.md from the figures in benchmarks/results/.

python benchmarks/table.py
"""

import collections
import json

from figures import RESULTS, ROOT

# docs/experts.md has them.
_OF_EXPERTS = ("Mixtral", "Qwen3 30B", "Qwen3.5 35B", "Qwen3-Next", "GLM", "gpt-oss", "DeepSeek")
BEGIN, END = "<!-- benchmarks/table.py -->", "<!-- end -->"


def step(figures: dict) -> list[tuple[str, str]]:
    ratios = ", ".join(f"{size['ratio']:.2f} ({name})" for name, size in figures.items())
    return [("`step`: our step / a bare hand-written JAX step", ratios)]


def stage_switch(figures: dict) -> list[tuple[str, str]]:
    rows = []
    for name, entry in figures.items():
        later = entry["stages"][1:]
        ratios = ", ".join(f"{s['first_over_median']:.2f}" for s in later)
        waits = ", ".join(f"{s['compile_seconds']:.2f}" for s in later)
        rows.append(
            (
                f"`stage_switch`: compiled {name}",
                f"{ratios}; waited {waits} s; lost {entry['lost']:.2f} s of {entry['total']:.0f} s",
            )
        )
    return rows


def startup(figures: dict) -> list[tuple[str, str]]:
    rows = []
    for name, parts in figures.items():
        named = ", ".join(
            f"{part} {s:.1f}" for part, s in parts.items() if part != "total" and s >= 0.05
        )
        rows.append(
            (f"`startup`: start to step 0 done, {name}", f"{parts['total']:.1f} s ({named})")
        )
    return rows


def memory(figures: dict) -> list[tuple[str, str]]:
    ends = ("remat_policy=none, loss_block_tokens=0", "remat_policy=none, loss_block_tokens=512")
    ends += ("remat_policy=full, loss_block_tokens=512",)
    shown = "; ".join(
        f"{name}: {figures[name]['compiled']:.0f} ({figures[name]['measured']:.0f})"
        for name in ends
    )
    return [("`memory`: MiB of a step by the compiler (measured), 4,096 tokens x 32,000", shown)]


def scaling(figures: dict) -> list[tuple[str, str]]:
    layers = ", ".join(f"{n}: {f['compile_seconds']:.1f} s" for n, f in figures["layers"].items())
    rows = [("`scaling`: compile by layers, scanned", layers)]
    if figures["pods"]:
        pods = ", ".join(f"{n}: {f['compile_seconds']:.0f} s" for n, f in figures["pods"].items())
        rows.append(("`scaling`: compile of Llama 3.2 1B for TPU pods, here", pods))
    return rows


def loop(figures: dict) -> list[tuple[str, str]]:
    shown = ", ".join(f"{name}: {ms:.2f}" for name, ms in figures.items())
    return [("`loop`: ms of its own work in the loop's thread, a step", shown)]


def loader(figures: dict) -> list[tuple[str, str]]:
    rows = sorted(figures["read"], key=lambda row: row["times"])
    ends = (f"{r['times']:,.0f} ({r['source']}, {r['tokens']} tokens)" for r in (rows[0], rows[-1]))
    change = figures["stage change"]["prepared"]
    return [
        (
            "`loader`: rows read / what an 8B model eats on 8 H200 at 50% MFU, by source",
            " to ".join(ends),
        ),
        (
            "`loader`: ms waited for the first batch of a stage (for the others)",
            f"{1e3 * change['first_seconds']:.2f} ({1e3 * change['other_seconds']:.2f})",
        ),
    ]


def saving(figures: dict) -> list[tuple[str, str]]:
    return [
        (
            f"`saving`: a checkpoint of {figures['megabytes']:.0f} MB stops the loop for",
            f"{figures['blocked_median']:.3f} s (most {figures['blocked_most']:.3f}); the steps "
            f"after it take {figures['steps_after_over_others']:.2f} x the others",
        ),
        (
            "`saving`: to the end of the first step, warm: restart at step 1,000 of a ramp (start)",
            f"{figures['restart']:.2f} s ({figures['start']:.2f} s)",
        ),
    ]


def attention(figures: dict) -> list[tuple[str, str]]:
    kernels = collections.defaultdict(list)
    for case, ms in figures.items():
        rows, _, kernel = case.rpartition(", ")
        kernels[rows].append(f"{kernel} {ms['forward']:.1f} ({ms['both']:.1f})")
    shown = "; ".join(f"{rows}: {', '.join(times)}" for rows, times in kernels.items())
    return [("`attention`: ms of 2 rows of 8,192 tokens (with gradients)", shown)]


def compile(figures: dict) -> list[tuple[str, str]]:
    return [
        (
            f"`compile`: {name}",
            f"{entry['ours'][0] / entry['maxtext'][0]:.2f}, "
            f"{entry['ours'][2]:.1f} ({entry['maxtext'][2]:.1f})",
        )
        for name, entry in figures["configurations"].items()
        if not name.startswith(_OF_EXPERTS)
    ]


def noise_scale(figures: dict) -> list[tuple[str, str]]:
    ratios = ", ".join(f"{entry['ratio']:.3f} ({name})" for name, entry in figures.items())
    return [("`noise_scale`: a step that estimates it / one that does not", ratios)]


def gpu(figures: dict) -> list[tuple[str, str]]:
    rows = [
        (
            f"`gpu`: MFU by batch, {model}, rows of 4,096 tokens; memory / the preflight's",
            ", ".join(f"{s['global_batch_size']}: {s['mfu']:.3f}" for s in entry["stages"])
            + f"; {entry['memory']['ratio']:.2f}",
        )
        for model, entry in figures["models"].items()
    ]
    shapes = []
    for line in figures["attention of packed rows, ms"]:
        ours = line["packed and gradient"]
        ratios = [
            f"{ours / line[f'{name} and gradient']:.2f}" if name in line else "-"
            for name in ("masked", "whole")
        ]
        shapes.append(f"{line['tokens']:,} by {line['document']:,}: {', '.join(ratios)}")
    name = "`gpu`: packed attention with gradient / cuDNN's with a mask, without documents"
    name += "; tokens by document"
    rows.append((name, "; ".join(shapes)))
    return rows


def main() -> None:
    lines = ["| benchmark | figures |", "|---|---|"]
    parts = (step, noise_scale, stage_switch, loop, startup, memory, saving, loader, scaling)
    for make in (*parts, compile, gpu, attention):
        path = RESULTS / f"{make.__name__}.json"
        if path.exists():
            read = json.loads(path.read_text())
            lines += [f"| {name} | {text} |" for name, text in make(read["figures"])]
    page = ROOT / "docs" / "performance.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
