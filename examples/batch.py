"""A batch job that can be killed and started again: `python examples/batch.py ENGINES PROMPTS.jsonl ANSWERS.jsonl`.

A line of PROMPTS has an `id`, and a `prompt` or `messages`; other fields are those of `SamplingParams`:

    {"id": "one", "prompt": "def main():", "max_tokens": 64}

ANSWERS gets a line for each, in the order in which they end: the answer, or an `error`. Those that it has are not
computed again; to try a failed one again, remove its line. A text does not depend on the others, to the byte, so that a
job in two parts has the same answers as one.
"""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import track

from redraft.errors import RedraftError, UsageError
from redraft.runtime import Runtime, SamplingParams, Submission
from redraft.runtime.loop.scheduler import RequestOutput

Json = dict[str, Any]
AT_ONCE = 8


def read_lines(path: Path) -> list[Json]:
    """Return the objects of a file, one a line. Raises UsageError for a missing or repeated `id`."""
    lines = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    if len({line.get("id") for line in lines} - {None}) < len(lines):
        raise UsageError(f"each line of {path} needs an id of its own")
    return lines


def answered(path: Path) -> set[Any]:
    """Return the ids that have answers. A last line that was not written whole is cut off."""
    if not path.exists():
        return set()
    whole = path.read_bytes().rpartition(b"\n")[0]
    with path.open("r+b") as file:
        file.truncate(len(whole) + 1 if whole else 0)
    return {json.loads(line)["id"] for line in whole.splitlines()}


def submit(runtime: Runtime, line: Json, ended: queue.SimpleQueue[Any]) -> Submission:
    """Start a line's request, whose id is put into `ended` with its last output."""
    given = {name: value for name, value in line.items() if name not in ("id", "prompt", "messages")}
    prompt = line.get("prompt")
    if prompt is None:
        text = runtime.tokenizer.apply_chat_template(line["messages"])
        prompt = runtime.tokenizer.encode(text, special_tokens=False)

    def note(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            ended.put(line["id"])

    return runtime.submit(prompt, SamplingParams(**given), on_output=note)


def failed(runtime: Runtime, name: Any, error: Exception) -> Json:
    """Return the line of a request that failed. Raises UsageError if all others would fail too."""
    runtime.check_running()
    return {"id": name, "error": f"{type(error).__name__}: {error}"}


def answers(runtime: Runtime, lines: list[Json]) -> Iterator[Json]:
    """Yield the answer to each line, or its error, as soon as it is there. Twice `AT_ONCE` requests run or wait.

    Raises UsageError if the decode loop has died.
    """
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    left = iter(lines)
    running: dict[Any, Submission] = {}
    while True:
        while len(running) < 2 * AT_ONCE and (line := next(left, None)) is not None:
            try:
                running[line["id"]] = submit(runtime, line, ended)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a line, the others go on
                yield failed(runtime, line["id"], error)
        if not running:
            return
        done = ended.get()
        try:
            answer = {"id": done, **running.pop(done).result().to_json()}
        except RedraftError as error:
            answer = failed(runtime, done, error)
        yield answer


def main(engines: str, prompts: str, out: str) -> None:
    """Answer every line that has no answer yet."""
    path, lines = Path(out), read_lines(Path(prompts))
    known = answered(path)
    todo = [line for line in lines if line["id"] not in known]
    with Runtime.open(engines, max_num_seqs=AT_ONCE) as runtime, path.open("a", encoding="utf-8") as file:
        found = answers(runtime, todo)
        for answer in track(found, "answering", total=len(lines), completed=len(known)):
            file.write(json.dumps(answer) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
