"""A batch job over a cluster: `python examples/ray_batch.py ENGINES PROMPTS.jsonl ANSWERS.jsonl [REPLICAS]`.

It needs `pip install 'redraft[ray-data]'`. Lines and answers are those of examples/batch.py, with its rules: a
job that was killed goes on where it was, and a text does not depend on the others. Each of the REPLICAS processes has
its share of the cores, and takes AT_ONCE prompts of a block at once. ENGINES is a path on every node.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray

sys.path.insert(0, str(Path(__file__).parent))

from batch import AT_ONCE, answered, answers, read_lines

BLOCK = 4 * AT_ONCE


class Engine:
    """Answers blocks of lines in a process of its own."""

    def __init__(self, engines: str, cores: int) -> None:
        from redraft.runtime import Runtime
        from redraft.runtime.replicas.cores import core_sets, take_cores

        _, self._held = take_cores(core_sets(cores))
        self._runtime = Runtime.open(engines, max_num_seqs=AT_ONCE)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """Return the answers of a block of lines, as JSON."""
        lines = [json.loads(line) for line in block["line"]]
        return {"answer": [json.dumps(answer) for answer in answers(self._runtime, lines)]}


def main(engines: str, prompts: str, out: str, replicas: int = 1) -> None:
    """Answer the lines that have no answer yet."""
    done = answered(Path(out))
    lines = [json.dumps(line) for line in read_lines(Path(prompts)) if line["id"] not in done]
    if not lines:
        return
    ray.init(include_dashboard=False, log_to_driver=False)
    cores = max(1, int(ray.cluster_resources()["CPU"]) // (replicas + 1))
    found = ray.data.from_items([{"line": line} for line in lines]).map_batches(
        Engine, fn_constructor_args=(str(Path(engines).resolve()), cores), batch_size=BLOCK, batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=replicas), num_cpus=cores,
    )  # fmt: skip
    with Path(out).open("a", encoding="utf-8") as file:
        for row in found.iter_rows():
            file.write(row["answer"] + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:5]))
