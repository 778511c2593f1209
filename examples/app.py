"""An app of one's own with the runtime inside: `python examples/app.py ENGINES [PORT]`.

curl -N http://127.0.0.1:8001/continue -H 'Content-Type: application/json' -d '{"prompt": "def main():"}'
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from redraft.errors import RedraftError
from redraft.runtime import QueueFull, Runtime, SamplingParams, Submission


class Asked(BaseModel):
    """The body of a request."""

    prompt: str
    max_tokens: int = 128


def create_app(runtime: Runtime) -> FastAPI:
    """Return an app that streams the continuations of prompts."""
    app = FastAPI()

    def submitted(asked: Asked) -> Iterator[Submission]:
        """Start a request. It ends with the response, also if the client leaves before."""
        submission = runtime.submit(asked.prompt, SamplingParams(max_tokens=asked.max_tokens))
        try:
            yield submission
        finally:
            submission.abort()

    @app.post("/continue")
    async def stream(submission: Submission = Depends(submitted)) -> StreamingResponse:
        return StreamingResponse(aiter(submission), media_type="text/plain")

    @app.exception_handler(RedraftError)
    async def refused(request: Request, error: RedraftError) -> JSONResponse:
        return JSONResponse({"error": error.message}, 429 if isinstance(error, QueueFull) else 400)

    return app


def main(engines: str, port: str = "8001") -> None:
    """Serve until Ctrl-C."""
    with Runtime.open(engines, max_num_seqs=8, max_waiting=64) as runtime:
        runtime.warm()
        gc.collect()
        gc.freeze()  # a full collection would interrupt texts
        uvicorn.run(create_app(runtime), port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
