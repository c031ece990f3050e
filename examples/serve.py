"""The server of `polyformer serve` in your program, with another path in addition to the paths of OpenAI.

    pip install 'polyformer[serve]'
    polyformer train --out runs/demo
    MODEL=runs/demo uvicorn --app-dir examples serve:app
    curl localhost:8000/count -H 'content-type: application/json' -d '{"text": "class Stack:"}'
    curl localhost:8000/v1/completions -H 'content-type: application/json' \\
      -d '{"model": "demo", "prompt": "class Stack:"}'

Without further paths, the command `polyformer serve runs/demo` does the same.
"""

import os
from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel

import polyformer
from polyformer.applications.serving.app import ModelServer, create_app
from polyformer.applications.serving.engine import Limits

FOLDER = Path(os.environ["MODEL"])
model = polyformer.load(FOLDER)
server = ModelServer(model, FOLDER.resolve().name, Limits(batch=16, tokens=2048))
own = APIRouter()


class Text(BaseModel):
    """A text to count."""

    text: str


@own.post("/count")
def count(request: Text) -> dict[str, int]:
    """Return the number of tokens of a text."""
    return {"tokens": len(server.loaded.task.tokenizer.encode(request.text))}


app = create_app(server, own)
