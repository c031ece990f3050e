"""Serve a model over HTTP: FastAPI answers many clients concurrently, in threads that share the weights.

    pip install fastapi uvicorn
    polyformer train --out runs/demo
    MODEL=runs/demo uvicorn --app-dir examples serve:app
    curl localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "class Stack:"}'

The KV cache belongs to the call of `generate`, so threads share a model without a lock. Each request has its
own random generator, seeded by `seed`, so concurrent requests do not change a sample.
"""

import os

import torch
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

import polyformer
from polyformer.data import load_tokenizer

FOLDER = os.environ["MODEL"]
torch.set_num_threads(1)  # parallel requests use the cores, not parallel matrix products
model = polyformer.from_pretrained(FOLDER).eval()
tokenizer = load_tokenizer(FOLDER)
app = FastAPI(title="polyformer")


@app.exception_handler(RequestValidationError)
def invalid(_: object, error: RequestValidationError) -> JSONResponse:
    """Return what is wrong without the values: NaN and half of a surrogate pair are no JSON."""
    faults = [{"loc": fault["loc"], "msg": fault["msg"]} for fault in error.errors()]
    return JSONResponse({"detail": faults}, 422)


class Request(BaseModel):
    """A request for a continuation."""

    prompt: str = Field(min_length=1, max_length=10_000)
    max_new_tokens: int = Field(default=32, ge=1, le=1024)
    temperature: float = Field(default=1.0, gt=0)
    seed: int | None = None  # None: greedy decoding


class Answer(BaseModel):
    """The continuation and the mean log-probability of its tokens."""

    text: str
    score: float


@app.post("/generate")
def generate(request: Request) -> Answer:
    """Return the continuation. FastAPI runs a plain `def` in its thread pool."""
    drawn = {"do_sample": True, "temperature": request.temperature, "seed": request.seed}
    try:
        generated = model.generate(
            torch.tensor([tokenizer.encode(request.prompt)]),
            max_new_tokens=request.max_new_tokens,
            **(drawn if request.seed is not None else {}),
        )
    except polyformer.InputError as error:  # a client error, such as a prompt that is too long
        raise HTTPException(422, str(error)) from error
    text = generated.texts(tokenizer.decode)[0]
    return Answer(text=text, score=float(generated.scores[0] / generated.lengths[0]))
