# polyformer on the command line, as a user without privileges. On a CPU:
#   docker build --tag polyformer .
#   docker run --rm --volume "$PWD:/work" polyformer train --data notes.txt --out runs/notes
# With CUDA, on an image that has torch for it:
#   docker build --tag polyformer:cuda --build-arg BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime \
#       --build-arg INDEX=https://pypi.org/simple --build-arg EXTRAS=hub,gguf,serve,gpu .
#   docker run --rm --gpus all --volume "$PWD:/work" polyformer:cuda serve model.gguf
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hub,gguf,serve,sentencepiece,plot
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
COPY . /src
RUN python -m pip install --index-url ${INDEX} --extra-index-url https://pypi.org/simple "/src[${EXTRAS}]" \
    && rm -rf /src \
    && useradd --create-home --uid 1000 user
USER user
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["polyformer"]
CMD ["--help"]
